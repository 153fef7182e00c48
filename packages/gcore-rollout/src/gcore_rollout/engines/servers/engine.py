"""The base of engines whose servers run elsewhere."""

import asyncio
import shutil
import uuid
from abc import abstractmethod
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from transformers import AutoConfig

from gcore_rollout.engines.protocol import Completion, Request
from gcore_rollout.engines.queueing import (
    Control,
    QueuedSample,
    QueueingEngine,
    SampleFilter,
    StopStrings,
    TokenLimits,
)
from gcore_rollout.engines.registry import eos_token_ids
from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.servers.served import (
    RunningSample,
    StreamPiece,
    write_weights,
)
from gcore_rollout.engines.vllm.process import checkpoint_shapes, publish_weights
from gcore_rollout.errors import (
    EngineDiedError,
    EngineModelError,
    RolloutError,
    ServerRequestError,
)

Controls = Mapping[Control, tuple[str, Mapping[str, Any]]]
"""Path and further arguments of `ServerClient.call` by which a server is controlled, all of them idempotent."""

# An abort that overtakes its request finds no sample to end: it is sent until the sample has come.
_ABORT_INTERVAL_S = 0.25
# Tokens sampled before a pause may still be in flight: they have come when no token comes for this long.
_SETTLE_INTERVAL_S = 0.02


class ServerEngine(QueueingEngine[Request, Completion]):
    """An engine that a server runs; this process sends it samples, one request each. Made by `connect`.

    The server must not have other clients: its weights, pauses and version labels are set from here. It is never
    started or stopped: `close` leaves it idle, with the weights that it has.

    A status of 500 or above, a broken connection, or silence ends the engine: all calls, also later ones, raise an
    `EngineDiedError` that names the server. Nothing is sent a second time.
    """

    _HOW_TO_OPEN = "connect again"
    _GENERATE_PATH: ClassVar[str]
    _CONTROLS: ClassVar[Controls]
    _ENDS_PAUSED_SAMPLES: ClassVar[bool]
    """Whether the server answers an abort while it is paused."""

    def __init__(
        self,
        client: ServerClient,
        *,
        model_path: str | Path,
        max_length: int,
        max_num_seqs: int,
        is_on_cpu: bool = False,
        weights_dir: str | Path | None,
        eos: Sequence[int] | None,
    ) -> None:
        if weights_dir is not None and not Path(weights_dir).is_dir():
            raise ValueError(
                f"weights_dir is {str(weights_dir)!r}; expected an existing folder that the server sees"
            )
        self._model_path = Path(model_path)
        if not (self._model_path / "config.json").exists():
            raise EngineModelError(
                f"the server runs {self._model_path}, which is no model's folder on this machine: "
                "set model_path to a folder here that holds the same model"
            )
        config: Any = AutoConfig.from_pretrained(self._model_path).get_text_config()
        super().__init__(max_num_seqs=max_num_seqs)
        self._limits = TokenLimits(
            max_length=max_length,
            vocab_size=config.vocab_size,
            stop_strings=StopStrings(self._model_path),
        )
        self._client = client
        self._is_tied = bool(config.tie_word_embeddings)
        self._repacks_head = self._is_tied and is_on_cpu
        self._shapes = checkpoint_shapes(self._model_path)
        self._repacks_experts = is_on_cpu and "expert" in str(config.to_dict().keys())
        self._declared_eos = eos_token_ids(self._model_path)
        self._eos = self._declared_eos if eos is None else list(eos)
        self._identity = uuid.uuid4().hex
        self._weights_dir = None if weights_dir is None else Path(weights_dir).absolute()
        self._weights_folder: Path | None = None
        self._running: dict[str, RunningSample] = {}
        self._is_held = False
        self._controlling_call: asyncio.Future[None] | None = None
        self._notifications: set[asyncio.Task[None]] = set()

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        weights_dir: str | Path | None = None,
        model_path: str | Path | None = None,
        max_num_seqs: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> Self:
        """Ask a server what it runs, and take it over: awake, not paused, and with weights of version 0.

        Blocks until the server has answered, which may take it some seconds the first time.

        Args:
            url: see `ServerClient`, also for `timeout_s` and `api_key`.
            weights_dir: existing folder that this machine and the server's see under the same path; `update_weights`
                needs it. In memory (/dev/shm) if both are one machine.
            model_path: folder of the served model on this machine; default: the path that the server has.
            max_num_seqs: largest number of samples requested at once, each over a connection of its own; default: as
                many as the server computes at once, or 256 if it does not report that.
            eos_token_ids: tokens that end a completion; default: those of the model's generation config.
            timeout_s: the server may be silent while it loads weights, too.

        Raises:
            RolloutError: aiohttp is not installed.
            EngineDiedError: the server cannot be reached.
            RolloutError: it was started without a needed option.
        """
        client = ServerClient(url, timeout_s=timeout_s, api_key=api_key)
        settings = cls._ask(client)
        if model_path is not None:
            settings["model_path"] = model_path
        if max_num_seqs is not None:
            settings["max_num_seqs"] = max_num_seqs
        engine = cls(client, **settings, weights_dir=weights_dir, eos=eos_token_ids)
        engine._take_over()
        return engine

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Replace the weights; unknown or missing names and wrong shapes are refused before anything is sent.

        They are written to a new folder under ``weights_dir``, which the server loads between two steps and which stays
        until the next update. Running samples continue with the new weights, over keys and values of the old ones;
        samples that start later share no cached prefix with them.

        Raises:
            EngineDiedError: the server could not load them: its weights are now unknown.
        """
        async with self._controlling():
            self._check_update(version)
            if self._weights_dir is None:
                raise RolloutError(
                    "the engine was made without weights_dir: update_weights needs it"
                )
            new = dict(
                publish_weights(self._model_path, self._shapes, weights, is_tied=self._is_tied)
            )
            await self._check_update_possible()
            await _complete(self._replace_weights(new, self._weights_dir, version))
        self._start()

    async def close(self) -> None:
        """Leave the server, awake and not paused; calls still generating get a `RolloutError`."""
        if self._is_closed:
            return
        running_ids = list(self._running)
        self._stop()
        with suppress(EngineDiedError, ServerRequestError):
            if self._death is None:
                await self._abort_on_server(running_ids)
                if self._is_paused:
                    await self._control("resume")
                if self._is_asleep:
                    await self._control("wake")
        if self._notifications:
            await asyncio.wait(self._notifications)
        if self._weights_folder is not None:
            shutil.rmtree(self._weights_folder, ignore_errors=True)

    @asynccontextmanager
    async def _controlling(self) -> AsyncGenerator[None]:
        """Serialize the calls that change the state of the server. A loss of the server ends the engine."""
        self._check_open()
        # Not an asyncio.Lock: that stays bound to the event loop of its first user.
        while self._controlling_call is not None:
            await asyncio.wait([self._controlling_call])
        self._check_open()
        self._controlling_call = mine = asyncio.get_running_loop().create_future()
        try:
            yield
        except EngineDiedError as error:
            self._die(error.reason)
            raise
        finally:
            self._controlling_call = None
            mine.set_result(None)

    def _start(self) -> None:
        if (
            self._is_paused
            or self._is_asleep
            or self._is_held
            or self._is_closed
            or self._death is not None
        ):
            return
        for sample in chain.from_iterable(self._pop_groups()):
            if not sample.shares_prompt:
                self._prompt_tokens += len(sample.start_token_ids)
            running = RunningSample(
                sample=sample, server_id=uuid.uuid4().hex, version=self._version
            )
            self._running[running.server_id] = running
            running.task = asyncio.create_task(self._run(running))

    async def _run(self, running: RunningSample) -> None:
        read = self._reader(running)
        try:
            events = self._client.events(
                self._GENERATE_PATH,
                self._body(running.sample, running.server_id),
                may_be_silent=lambda: self._is_paused or self._is_held,
            )
            async with aclosing(events):
                async for event in events:
                    if "error" in event:
                        error = event["error"]
                        raise self._failure(
                            running.sample, status=int(error["code"]), answer=error["message"]
                        )
                    piece = self._cut_at_stop_string(running, read(event))
                    running.token_ids += piece.token_ids
                    running.log_probs += piece.log_probs
                    self._completion_tokens += len(piece.token_ids)
                    if piece.finish_reason is not None:
                        # Before the completion is handed over: its receiver may ask how much is running.
                        del self._running[running.server_id]
                        running.finish(piece.finish_reason, piece.version_spans)
                        if piece.ended_here:
                            self._notify_gone([running])
                        else:
                            # Read the stream to its end, instead of hanging up.
                            with suppress(EngineDiedError):
                                async for _ in events:
                                    pass
                        return
            raise EngineDiedError(
                f"the server at {self._client.url} ended a stream without a finish reason"
            )
        except EngineDiedError as error:
            self._die(error.reason)
        except ServerRequestError as error:
            if error.status >= 500:
                self._die(str(error))
            else:
                running.sample.call.finished.put_nowait(error)
        except Exception as error:
            running.sample.call.finished.put_nowait(error)
        finally:
            self._running.pop(running.server_id, None)
            self._start()

    def _cut_at_stop_string(self, running: RunningSample, piece: StreamPiece) -> StreamPiece:
        """Return a piece up to the token that completes a stop string, if there is one."""
        sample = running.sample
        before = [sample.prefix.token_ids, running.token_ids]
        end = self._limits.stop_strings.find_end(
            piece.token_ids, sample.request.sampling.stop, before=before
        )
        if end is None:
            return piece
        return replace(
            piece,
            token_ids=piece.token_ids[:end],
            log_probs=piece.log_probs[:end],
            finish_reason="stop",
            ended_here=piece.finish_reason is None or piece.ended_here,
        )

    async def _abort_running(self, which: SampleFilter) -> None:
        """End samples on the server, and wait until they have come."""
        if (self._is_paused or self._is_held) and not self._ENDS_PAUSED_SAMPLES:
            self._remove_running(which, as_aborted=True)
            return
        tasks = {r.server_id: r.task for r in self._running.values() if which(r.sample)}
        end = asyncio.get_running_loop().time() + self._client.timeout_s
        try:
            while tasks := {
                server_id: task for server_id, task in tasks.items() if not task.done()
            }:
                if asyncio.get_running_loop().time() > end:
                    raise EngineDiedError(
                        f"the server at {self._client.url} does not end aborted samples"
                    )
                await self._abort_on_server(list(tasks))
                await asyncio.wait(tasks.values(), timeout=_ABORT_INTERVAL_S)
        except EngineDiedError as error:
            self._die(error.reason)
            raise

    def _remove_running(self, which: SampleFilter, *, as_aborted: bool) -> list[QueuedSample]:
        """Drop samples: their connections are closed, and the server is notified."""
        dropped = [running for running in self._running.values() if which(running.sample)]
        for running in dropped:
            if as_aborted:
                running.finish("abort")
            del self._running[running.server_id]
            # One of them may be the current task.
            if running.task is not asyncio.current_task():
                running.task.cancel()
        if dropped and not self._is_closed and self._death is None:
            self._notify_gone(dropped)
        self._start()
        return [running.sample for running in dropped]

    def _notify_gone(self, gone: Sequence[RunningSample]) -> None:
        """Notify the server, in the background, that these samples are not wanted any more."""

        async def forget() -> None:
            # If the server is lost, the calls in flight fail.
            with suppress(EngineDiedError, ServerRequestError):
                await self._abort_on_server([running.server_id for running in gone])

        notification = asyncio.create_task(forget())
        self._notifications.add(notification)
        notification.add_done_callback(self._notifications.discard)

    async def _replace_weights(
        self, tensors: Mapping[str, torch.Tensor], parent: Path, version: int
    ) -> None:
        """Have the server load new weights between two steps."""
        folder = unused = await asyncio.to_thread(
            write_weights, tensors, parent, version=version, model_path=self._model_path
        )
        self._is_held = True
        # Asleep it stands still, too, and a call to resume would start it.
        stands = self._is_paused or self._is_asleep
        try:
            if not stands:
                await self._control("pause")
            try:
                await self._load_on_server(folder, version)
            except ServerRequestError as error:
                reason = f"the weights in {folder} could not be loaded, does the server see them? {error}"
                raise EngineDiedError(reason) from error
            unused = self._weights_folder
            self._weights_folder = folder
            self._has_taken(version)
            for running in self._running.values():
                running.updates.append((len(running.token_ids), version))
            if not stands:
                await self._control("resume")
        finally:
            self._is_held = False
            if unused is not None:
                shutil.rmtree(unused, ignore_errors=True)

    async def _control(self, name: Control) -> None:
        path, arguments = self._CONTROLS[name]
        await self._client.call("POST", path, **arguments)
        if name == "pause":
            await self._settle()

    async def _settle(self) -> None:
        """Wait until the tokens sampled before a pause have come."""
        num_tokens = -1
        while num_tokens < self._completion_tokens:
            num_tokens = self._completion_tokens
            await asyncio.sleep(_SETTLE_INTERVAL_S)

    def _die(self, reason: str) -> None:
        if self._death is None and not self._is_closed:
            self._death = reason
            self._fail(EngineDiedError(reason))

    def _check_request(self, request: Request) -> None:
        self._limits.check(request)

    def _num_running(self) -> int:
        return len(self._running)

    @property
    def _cache_salt(self) -> str:
        """Servers keep prefixes computed with older weights, also of an earlier client: each version has its own."""
        return f"{self._identity}-{self._version}"

    def _failure(self, sample: QueuedSample, *, status: int, answer: str) -> ServerRequestError:
        """Return the error of a stream which reports that its sample failed."""
        name = f"sample {sample.index} of {sample.request.request_id!r}, POST {self._client.url}{self._GENERATE_PATH}"
        return ServerRequestError(name, status=status, answer=answer)

    @classmethod
    @abstractmethod
    def _ask(cls, client: ServerClient) -> dict[str, Any]:
        """Ask what the server runs, and refuse one that was started without a needed option. Blocks.

        Returns:
            The constructor's ``model_path``, ``max_length`` (longest prompt + completion in tokens), ``max_num_seqs``
            and, if it is known, ``is_on_cpu``.
        """

    @abstractmethod
    def _take_over(self) -> None:
        """Bring the server into the state that `connect` promises, whatever it was. Blocks."""

    @abstractmethod
    def _body(self, sample: QueuedSample, server_id: str) -> dict[str, Any]:
        """Return the JSON to be sent to ``_GENERATE_PATH``."""

    @abstractmethod
    def _reader(self, running: RunningSample) -> Callable[[Any], StreamPiece]:
        """Return what reads the events of the answer one by one, and raises `ServerRequestError` for a failure."""

    @abstractmethod
    def _abort_on_server(self, server_ids: Sequence[str]) -> Awaitable[None]:
        """End samples; unknown ones are ignored, and the list may be empty."""

    @abstractmethod
    def _load_on_server(self, folder: Path, version: int) -> Awaitable[None]:
        """Load a folder's weights while paused; tokens sampled afterwards are labelled ``version``."""

    async def _check_update_possible(self) -> None:
        """Refuse an update that the server cannot apply completely."""


async def _complete(work: Coroutine[Any, Any, None]) -> None:
    """Complete the work even if the caller is cancelled: a server must not be left half-way."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
