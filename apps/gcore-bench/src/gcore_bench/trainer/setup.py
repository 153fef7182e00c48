"""Make the models, the tokenizer and the samples that contenders share, once, in a process of its own."""

from pathlib import Path

from gcore_bench.harness.child import Spec
from gcore_bench.harness.models import make_model
from gcore_bench.harness.rounds import Figures
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.workload import long_workload, make_samples, off_policy, save_samples, step_workload
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_trainer import PackedModel


def run(spec: Spec) -> dict[str, Figures]:
    """Write ``model``, ``long-model``, ``tokenizer`` and ``samples.npz``."""
    folder, options = Path(spec.folder), TrainerOptions(**spec.options)
    make_model(folder / "model", step_workload(options), max_length=options.max_tokens, seed=options.seed)
    make_model(folder / "long-model", long_workload(options), max_length=max(options.lengths) + 1, seed=options.seed)
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    samples = make_samples(options)
    (log_probs,) = PackedModel.from_pretrained(folder / "model").log_probs([samples])
    save_samples(folder / "samples.npz", off_policy(samples, log_probs, seed=options.seed))
    return {}
