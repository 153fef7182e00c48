"""Settings of where a model generates: the policy, and a judge."""

from dataclasses import dataclass

from gcore_runs.errors import UserError, check_at_least

_ENGINES = ("hf", "vllm", "vllm_server", "sglang_server")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What a model generates in."""

    engine: str = "hf"
    """hf: transformers; vllm: vLLM; vllm_server and sglang_server: servers of these, which run already, at urls.
    PATH.py:function: an engine of your own (gcore_rollout.Engine), made by a function of the model's folder and the
    keywords device, dtype, max_num_seqs and eos_token_ids."""
    num_processes: int = 0
    """Replicas of an engine that is not on servers, each a process of its own that is replaced if it dies; 0: one, in
    the main process. All processes that generate share the threads, and each has a GPU of its own as long as there are
    any."""
    urls: tuple[str, ...] = ()
    """Servers, such as http://10.0.0.7:8000, each a replica, and this run's alone while it lasts."""

    @property
    def is_own(self) -> bool:
        """Whether it is the user's."""
        return self.engine not in _ENGINES

    @property
    def is_on_servers(self) -> bool:
        return self.engine in ("vllm_server", "sglang_server")

    def check_engine(self, prefix: str) -> None:
        """
        Raises:
            UserError: settings that do not fit together; ``prefix`` is where they are.
        """
        check_at_least(f"{prefix}.num_processes", self.num_processes, 0)
        if self.is_own and ".py:" not in self.engine:
            raise UserError(f"{prefix}.engine is {self.engine!r}: {', '.join(_ENGINES)} or PATH.py:function is needed")
        if self.is_on_servers != bool(self.urls):
            raise UserError(
                f"{prefix}.engine is {self.engine!r} and {prefix}.urls is {list(self.urls)}: "
                "vllm_server or sglang_server with one or more urls is needed, or another engine without"
            )
        if len(set(self.urls)) < len(self.urls):
            raise UserError(f"{prefix}.urls is {list(self.urls)}: each server may come once")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"{prefix}.urls has {url!r}: http://HOST:PORT or https://HOST:PORT is needed")
        if self.is_on_servers and self.num_processes:
            raise UserError(
                f"{prefix}.num_processes is {self.num_processes} and {prefix}.engine is {self.engine!r}: 0 is needed, "
                f"the replicas are the servers at {prefix}.urls"
            )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding in vllm: tokens are guessed and checked together; the samples' distribution stays."""

    num_speculative_tokens: int = 0
    """Tokens guessed at a time; 0: none."""
    model: str = ""
    """Hugging Face folder of a smaller model with the same tokens, which guesses; empty: what followed on the last
    occurrence of the same tokens (ngram)."""
    prompt_lookup_max: int = 4
    """Most tokens that such an occurrence is to share ..."""
    prompt_lookup_min: int = 2
    """... and fewest."""

    def __post_init__(self) -> None:
        check_at_least("rollout.speculative.num_speculative_tokens", self.num_speculative_tokens, 0)
        check_at_least("rollout.speculative.prompt_lookup_min", self.prompt_lookup_min, 1)
        check_at_least("rollout.speculative.prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min)
        if self.model and not self.num_speculative_tokens:
            raise UserError(
                f"rollout.speculative.model is {self.model!r} and rollout.speculative.num_speculative_tokens is 0: "
                "1 or more is needed"
            )

    def as_vllm_takes_it(self) -> dict[str, object] | None:
        """The setting of vLLM; None: no speculation."""
        if not self.num_speculative_tokens:
            return None
        guess: dict[str, object] = {"method": "draft_model", "model": self.model}
        if not self.model:
            guess = {
                "method": "ngram",
                "prompt_lookup_max": self.prompt_lookup_max,
                "prompt_lookup_min": self.prompt_lookup_min,
            }
        return {"num_speculative_tokens": self.num_speculative_tokens, **guess}
