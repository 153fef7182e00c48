"""`gcore-bench trainer`: training steps under gcore-trainer and the trainer code of TRL and verl, in forked processes.

Shapes: B samples, T tokens of a row, R tokens of the longest response, D dimension of a head.
"""

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

import numpy as np

from gcore_bench.harness.processes import (
    Spec,
    draw_length,
    make_model,
    measure_work,
    run_processes,
    start_server,
)
from gcore_bench.harness.report import (
    BenchError,
    BenchOptions,
    BenchSession,
    Figures,
    Row,
    add_ratios,
)
from gcore_placement import micro_batches
from gcore_runs import Count, NonNegative, at_least
from gcore_runs.settings.checks import multiple_of
from gcore_trainer import OptimizerConfig, PolicyLossConfig, Sample

if TYPE_CHECKING:
    import torch

StepContender = Literal["trl", "verl", "gcore-packed", "gcore-shared"]

OPTIMIZER = OptimizerConfig(lr=1e-9, grad_clip=1.0)
"""The rate is so low that the weights stay the same, and every step computes the same loss."""
LOSS = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean")

_RESPONSES = 4
"""Responses to each prompt."""
_MAX_PROMPT_LENGTH = 96
_TOLERANCE = 1e-4

_COLUMNS: dict[str, str] = {
    "step s": "step_s .3f",
    "over shared": "step_s_ratio x",
    "CPU s": "cpu_s .3f",
    "CPU s over shared": "cpu_s_ratio x",
    "extra MB": "peak_bytes MB",
    "tokens": "computed_tokens ,.0f",
    "loss": "loss .5f",
    "grad norm": "grad_norm .4f",
}
_NOTE = (
    "The same model, tokens, micro-batch limits and AdamW for all, float32. extra MB: highest resident memory of the "
    "process during a step, less that with weights, gradients and moments allocated. verl: its log-probabilities and "
    "policy loss, on gcore-packed's micro-batches; flash-attention, which has no CPU kernel, is replaced by torch's "
    "kernel, sequence by sequence."
)


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(BenchOptions):
    """Measure gcore-trainer against TRL's and verl's trainer code, in turn, each in processes of its own."""

    contenders: tuple[StepContender, ...] = get_args(StepContender)
    """Contenders in the order in which they run."""
    rounds: Count = 2
    """Number of rounds, in each of which every contender runs once."""
    steps: Count = 2
    """Measured steps of a run."""
    prompts: Count = 8
    """Prompts of the step, with four responses each."""
    max_response_length: Annotated[int, at_least(2)] = 384
    """Length at which responses are truncated."""
    hidden_size: Annotated[int, at_least(32), multiple_of(32)] = 128
    """Hidden size of the model, which has four layers."""
    vocab_size: Count = 8192
    """Vocabulary of the model."""
    threads: Count = 1
    """Threads of each process."""
    seed: NonNegative = 0
    """Seed of lengths, tokens and weights."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "steps": 1,
        "prompts": 2,
        "max_response_length": 16,
        "hidden_size": 32,
        "vocab_size": 256,
    }

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch, at most: those of the largest group, or 2,048."""
        return max(2048, _MAX_PROMPT_LENGTH + _RESPONSES * self.max_response_length)


def run(options: TrainerOptions, session: BenchSession) -> None:
    """Measure and print the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not compute the same.
    """
    start_server(options.threads)
    run_processes([_make_spec("setup", options, session.folder)])
    rounds = session.start_rounds("step")
    for turn in rounds.turns(options.contenders):
        figures = run_processes([_make_spec(turn.contender, options, session.folder)])
        turn.done(figures, "{step_s:.2f} s")
    rows = rounds.summarise()
    check_agreement(rows)
    add_ratios(rows, rounds.runs, "gcore-shared", "step_s", "cpu_s")
    session.report("one policy-gradient step", _COLUMNS, rows, rounds.runs, lines=[_NOTE])


def check_agreement(rows: Mapping[str, Row]) -> None:
    """Check that contenders computed the same loss and gradient norm from the same tokens.

    Raises:
        BenchError: two of them differ by more than 1e-4, relative to 1 or the value.
    """
    first = next(iter(rows))
    for metric in ("loss", "grad_norm"):
        expected = rows[first][metric]
        for name, row in rows.items():
            if not abs(row[metric] - expected) <= _TOLERANCE * max(1.0, abs(expected)):
                raise BenchError(
                    f"{metric} is {expected} for {first}, but {row[metric]} for {name}"
                )


def _make_spec(contender: str, options: TrainerOptions, folder: Path) -> Spec:
    return Spec(
        work="gcore_bench.trainer:measure",
        contender=contender,
        folder=folder,
        options=options,
        threads=options.threads,
    )


def make_samples(options: TrainerOptions) -> list[Sample]:
    """Return the step's samples in group order, with advantages, and without old log-probs."""
    rng = np.random.default_rng(options.seed)
    samples: list[Sample] = []
    for _ in range(options.prompts):
        prompt_length = int(rng.integers(_MAX_PROMPT_LENGTH // 3, _MAX_PROMPT_LENGTH + 1))
        prompt = rng.integers(1, options.vocab_size, prompt_length)
        scores = rng.normal(size=_RESPONSES)
        for score in scores - scores.mean():
            length = draw_length(rng, 48, options.max_response_length)
            response = rng.integers(1, options.vocab_size, length)
            advantages = np.full(response.size, score, np.float32)
            samples.append(Sample(prompt_ids=prompt, response_ids=response, advantages=advantages))
    return samples


def step_batches(
    options: TrainerOptions, samples: Sequence[Sample], contender: str
) -> list[list[int]]:
    """Return the samples of each of a contender's micro-batches.

    TRL has four of equal counts, gcore-shared whole groups within the budget of tokens, the others single samples.
    """
    if contender == "trl":
        return np.arange(len(samples)).reshape(4, -1).tolist()
    size = _RESPONSES if contender == "gcore-shared" else 1
    lengths: list[int] = []
    for first in range(0, len(samples), size):
        responses = [sample.response_ids.size for sample in samples[first : first + size]]
        lengths.append(samples[first].prompt_ids.size + sum(responses))
    batches: list[list[int]] = []
    for groups in micro_batches(lengths, max_tokens=options.max_tokens):
        indices = groups[:, None] * size + np.arange(size)
        batches.append(indices.ravel().tolist())
    return batches


def measure(spec: Spec) -> Figures:
    """Return the figures of a contender, in its process; of the setup there are none."""
    if spec.contender == "setup":
        set_up(spec.folder, spec.options)
        return {}
    return _measure_step(spec, spec.options)


def set_up(folder: Path, options: TrainerOptions) -> None:
    """Write ``model``, ``tokenizer`` and ``samples``, which contenders share."""
    from gcore_llm.tiny_model import tiny_tokenizer
    from gcore_trainer import PackedModel

    make_model(
        folder / "model",
        hidden_size=options.hidden_size,
        layers=4,
        heads=4,
        vocab_size=options.vocab_size,
        max_length=options.max_tokens,
        seed=options.seed,
    )
    tiny_tokenizer().save_pretrained(folder / "tokenizer")
    samples = make_samples(options)
    (log_probs,) = PackedModel.from_pretrained(folder / "model").log_probs([samples])
    rng = np.random.default_rng(options.seed)
    for index, values in enumerate(log_probs):
        # Imitates an older policy; some ratios are clipped.
        noisy = values + rng.normal(0.0, 0.1, values.shape)
        samples[index] = replace(samples[index], old_log_probs=noisy.astype(np.float32))
    (folder / "samples").write_bytes(pickle.dumps(samples))


def _measure_step(spec: Spec, options: TrainerOptions) -> Figures:
    """Return seconds and memory of a step, and its result."""
    folder = spec.folder
    samples: list[Sample] = pickle.loads((folder / "samples").read_bytes())
    batches = step_batches(options, samples, spec.contender)
    if spec.contender == "trl":
        stepper = TrlStep(folder)
    elif spec.contender == "verl":
        stepper = VerlStep(folder)
    else:
        stepper = GcoreStep(folder, share_prefix=spec.contender == "gcore-shared")
    # Enough to trigger the imports of a first step and to allocate moments, and so small that it frees no large blocks.
    warmup = list(map(_truncate, samples[:2]))
    stepper.step(warmup, [[0, 1]])
    results: list[Figures] = []
    times = measure_work(
        lambda: results.append(stepper.step(samples, batches)), times=options.steps
    )
    return times | results[0]


def _truncate(sample: Sample) -> Sample:
    """Return a sample with two tokens of its prompt and of its response."""
    names = ("prompt_ids", "response_ids", "advantages", "old_log_probs")
    return replace(sample, **{name: getattr(sample, name)[:2] for name in names})


class GcoreStep:
    """`TorchTrainer` on packed rows, with a group's prompt computed once if it is shared."""

    def __init__(self, folder: Path, *, share_prefix: bool) -> None:
        from gcore_trainer import PackedModel, PolicyObjective, TorchTrainer

        packed = PackedModel.from_pretrained(folder / "model", share_prefix=share_prefix)
        self._trainer = TorchTrainer(packed, optimizer=OPTIMIZER, objective=PolicyObjective(LOSS))

    def step(self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> Figures:
        """See `LossStep.step`."""
        parts = [[samples[i] for i in batch] for batch in batches]
        metrics = self._trainer.train_step(parts)
        return {
            "loss": metrics["actor/pg_loss"],
            "grad_norm": metrics["actor/grad_norm"],
            "computed_tokens": metrics["perf/computed_tokens"],
        }


class LossStep(ABC):
    """Steps of a model under the loss of another library, with the optimizer that `TorchTrainer` would make."""

    def __init__(self, model: Any) -> None:
        import torch

        self.model = model
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            fused=True,
            lr=OPTIMIZER.lr,
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
        )

    def step(self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> Figures:
        """Add up the losses of the batches of samples, and update; return the figures that contenders must agree on.

        Computed tokens are those that passed through the model's layers, padding included.
        """
        import torch

        loss = 0.0
        computed_tokens = 0
        for partial_loss, num_tokens in self._partial_losses(samples, batches):
            partial_loss.backward()
            loss += partial_loss.item()
            computed_tokens += num_tokens
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self._optimizer.step()
        # gcore keeps gradients allocated, too: they are in the memory before every contender's step, and in no peak.
        self._optimizer.zero_grad(set_to_none=False)
        return {
            "loss": loss,
            "grad_norm": grad_norm.item(),
            "computed_tokens": float(computed_tokens),
        }

    @abstractmethod
    def _partial_losses(
        self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]
    ) -> "Iterator[tuple[torch.Tensor, int]]":
        """Yield the part of the loss that each batch makes up, and the number of its computed tokens."""


class TrlStep(LossStep):
    """The loss of a real `GRPOTrainer` of TRL on batches padded the way it pads them."""

    def __init__(self, folder: Path) -> None:
        import torch

        # Otherwise TRL imports vLLM, which takes ten seconds and is not used here.
        import_module("trl.import_utils").__dict__["is_vllm_available"] = lambda *_, **__: False
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        from gcore_runs import build_tokenizer

        def score(completions: list[Any], **_: Any) -> list[float | None]:
            return [0.0] * len(completions)

        policy: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self._trainer: Any = GRPOTrainer(
            model=policy,
            reward_funcs=score,
            args=GRPOConfig(
                output_dir=str(folder / "trl"),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=1,
                num_generations=2,
                loss_type="dapo",
                epsilon=LOSS.clip_ratio_low,
                epsilon_high=LOSS.clip_ratio_high,
                beta=0.0,
                temperature=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["1", "2"]}),
            # TRL requires one; this bench does not use it.
            processing_class=build_tokenizer(folder / "tokenizer"),
        )
        super().__init__(self._trainer.model)
        self.model.train()

    def _partial_losses(
        self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]
    ) -> "Iterator[tuple[torch.Tensor, int]]":
        import torch

        # Prompts on the left and completions on the right, to the longest of the whole generation batch.
        prompts = _pad(samples, "prompt_ids", side="left")
        completions = _pad(samples, "response_ids")
        # No sample has the token 0.
        completion_mask = (completions != 0).long()
        columns = {
            "prompt_mask": (prompts != 0).long(),
            "completion_mask": completion_mask,
            "prompt_ids": prompts,
            "completion_ids": completions,
            "advantages": _pad(samples, "advantages")[:, 0],
            "old_per_token_logps": _pad(samples, "old_log_probs"),
        }
        # The loss of a micro-batch is scaled by the number of them in a generation batch.
        self._trainer.args.steps_per_generation = len(batches)
        self._trainer.current_gradient_accumulation_steps = len(batches)
        for batch in batches:
            rows = torch.tensor(batch)
            inputs = {name: column[rows] for name, column in columns.items()}
            inputs["num_items_in_batch"] = completion_mask.sum()
            num_tokens = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            yield self._trainer._compute_loss(self.model, inputs), num_tokens


class VerlStep(LossStep):
    """verl's log-probabilities of whole rows without padding, and its policy loss, in the order of its FSDP engine.

    Not verl's: the engine around them, which needs ray, and flash-attention, which needs CUDA. The forward pass here is
    transformers' on the row that the engine makes (concatenated tokens, positions that restart, labels rolled by one),
    with one call of torch's fused attention kernel for each sequence, which computes no more than the varlen kernel.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AttentionInterface, AutoModelForCausalLM

        # verl's functions need one name of ray but not ray itself, which this replaces in the process.
        sys.modules.setdefault("ray", ModuleType("ray")).__dict__.setdefault("ObjectRef", object)
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.utils.torch_functional import logprobs_from_logits
        from verl.workers.config.actor import ActorConfig

        self._policy_loss: Any = get_policy_loss_fn("vanilla")
        self._logprobs_from_logits: Any = logprobs_from_logits
        actor_config: Any = ActorConfig
        self._config = actor_config(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=LOSS.clip_ratio_low,
            clip_ratio_high=LOSS.clip_ratio_high,
        )
        AttentionInterface.register("bench_varlen", _attend)
        load = AutoModelForCausalLM.from_pretrained
        super().__init__(
            load(folder / "model", dtype=torch.float32, attn_implementation="bench_varlen")
        )

    def _partial_losses(
        self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]
    ) -> "Iterator[tuple[torch.Tensor, int]]":
        self._config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=sum(sample.response_ids.size for sample in samples),
            global_batch_size=len(samples),
            loss_scale_factor=None,
        )
        for batch in batches:
            chosen = [samples[i] for i in batch]
            log_probs_BR, row_length = self._compute_log_probs(chosen)
            loss, _ = self._policy_loss(
                old_log_prob=_pad(chosen, "old_log_probs"),
                log_prob=log_probs_BR,
                advantages=_pad(chosen, "advantages"),
                response_mask=_pad(chosen, "mask"),
                loss_agg_mode=LOSS.loss_agg_mode,
                config=self._config,
            )
            yield loss, row_length

    def _compute_log_probs(self, samples: Sequence[Sample]) -> "tuple[torch.Tensor, int]":
        """Return the log-probs of the responses, [B, R], and the number of tokens of the row."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        rows = [np.concatenate([sample.prompt_ids, sample.response_ids]) for sample in samples]
        input_ids_1T = torch.from_numpy(np.concatenate(rows))[None]
        lengths = [row.size for row in rows]
        output = self.model(
            input_ids=input_ids_1T,
            attention_mask=None,
            position_ids=torch.cat(list(map(torch.arange, lengths)))[None],
            use_cache=False,
            sequence_lengths=lengths,
        )
        labels_T = torch.roll(input_ids_1T, shifts=-1, dims=1)[0]
        log_probs_T = self._logprobs_from_logits(logits=output.logits[0], labels=labels_T)
        responses: list[torch.Tensor] = []
        for sample, row in zip(samples, log_probs_T.split(lengths), strict=True):
            # The last token of the prompt predicts the first of the response; the last of the response nothing.
            responses.append(row[sample.prompt_ids.size - 1 : -1])
        return pad_sequence(responses, batch_first=True), sum(lengths)


def _attend(
    module: "torch.nn.Module",
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    *,
    sequence_lengths: list[int],
    scaling: float | None = None,
    **arguments: Any,
) -> "tuple[torch.Tensor, None]":
    """Attend within each sequence of the row; inputs are [1, heads, T, D], the output is [1, T, heads, D]."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    del module, attention_mask, arguments
    outputs: list[torch.Tensor] = []
    start = 0
    for length in sequence_lengths:
        rows = slice(start, start + length)
        q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
        outputs.append(
            scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                scale=scaling,
                enable_gqa=True,
            )
        )
        start += length
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _pad(samples: Sequence[Sample], name: str, *, side: str = "right") -> "torch.Tensor":
    """Stack a field of samples, [B, T], with zeros after (or before) the shorter ones."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    rows = [torch.from_numpy(getattr(sample, name)) for sample in samples]
    return pad_sequence(
        rows,
        batch_first=True,
        padding_side=side,
    )
