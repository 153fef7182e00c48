"""Checkpoints of the Trainer of transformers, written while it trains on."""

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import MissingExtraError
from gcore_ckpt.format.tree import State
from gcore_ckpt.integrations.training import (
    RANDOM_STATES,
    random_states,
    set_random_states,
    state_of_model,
    stateful_optimizer,
)
from gcore_ckpt.loading.reader import Step

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import SaveStrategy
except ModuleNotFoundError:
    raise MissingExtraError("transformers", "transformers") from None

if TYPE_CHECKING:
    from transformers import Trainer

_STATE_FILE = "trainer_state.json"


class CheckpointCallback(TrainerCallback):
    """Saves through a Checkpointer whenever the Trainer would save, in place of its own checkpoints.

        callback = CheckpointCallback(checkpointer)
        trainer = Trainer(..., callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    A step holds the model, the optimizer, the scheduler, the scaler, every rank's random number generators and the
    Trainer's state. It is copied at the start of the next step, after the logs and the evaluation of its own, and
    committed in the background; `train` returns once all is committed. `save_steps` and `save_strategy` say when, the
    Checkpointer which steps are kept. Sharded models are those of FSDP2.

    Args:
        checkpointer: It is left open. Callbacks that set `should_save` themselves come before this one.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._is_due = False
        self._resumed: int | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self._random_states: State = None

    def resume(self, trainer: "Trainer", *, step: Step = "latest") -> str | None:
        """Prepare a Trainer to continue after a committed step, on any number of ranks.

        Args:
            trainer: Has this callback, and has not trained yet.
            step: Number of the step; `"latest"` is the highest committed one.

        Returns:
            The argument `resume_from_checkpoint` of its `train`, which loads the step; None if none is committed.
        """
        steps = self._checkpointer.steps()
        if not steps and step == "latest":
            return None
        self._resumed = steps[-1] if step == "latest" else step
        saved = self._checkpointer.load(only=["trainer"], step=self._resumed)["trainer"]
        self._folder = TemporaryDirectory(prefix="gcore-ckpt-")
        folder = self._folder.name
        TrainerState(**saved).save_to_json(str(Path(folder, _STATE_FILE)))
        load_weights: Any = getattr(trainer, "_load_from_checkpoint")  # noqa: B009 - private, as below

        def load_others(checkpoint: str, *model: Any) -> None:
            if checkpoint != folder:
                load_weights(checkpoint, *model)

        # The Trainer reads its own state from the folder, and would read the weights, which `on_train_begin` fills in
        # place. It has no public way to leave them out.
        setattr(trainer, "_load_from_checkpoint", load_others)  # noqa: B010 - private
        return folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        strategy = SaveStrategy(args.save_strategy)
        is_best_loaded = args.load_best_model_at_end
        if strategy is SaveStrategy.BEST or is_best_loaded:
            settings = (
                f"save_strategy is {strategy.value!r} and load_best_model_at_end {is_best_loaded}"
            )
            raise ValueError(
                f"{settings}; expected 'steps' or 'epoch', and False: the Trainer reads back its own files"
            )
        if args.deepspeed is not None:
            raise ValueError(
                f"deepspeed is {args.deepspeed!r}; expected None: use FSDP2 for a sharded model"
            )
        if self._resumed is None:
            return
        if state.global_step != self._resumed:
            raise ValueError(
                f"resume was called for step {self._resumed}, and the Trainer starts at step {state.global_step}; "
                "expected train(resume_from_checkpoint=callback.resume(trainer))"
            )
        parts = _parts(**kwargs) | {"rng": RANDOM_STATES}
        self._random_states = self._checkpointer.load(parts, step=self._resumed)["rng"]
        self._resumed = None
        if self._folder is not None:
            self._folder.cleanup()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_due = self._is_due or control.should_save
        control.should_save = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.on_step_end(args, state, control)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._save_if_due(args, state, control, kwargs)
        # In the middle of an epoch, generators continue once the batches before are skipped.
        self._restore_random_states()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._save_if_due(args, state, control, kwargs)
        if float(state.epoch or 0).is_integer():
            self._restore_random_states()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._save_if_due(args, state, control, kwargs)
        self._checkpointer.wait()

    def _restore_random_states(self) -> None:
        set_random_states(self._random_states)
        self._random_states = None

    def _save_if_due(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        kwargs: dict[str, Any],
    ) -> None:
        if not self._is_due:
            return
        self._is_due = False
        parts: dict[str, State] = {**_parts(**kwargs), "rng": random_states()}
        parts["model"] = state_of_model(parts["model"], args.process_index)
        if state.is_world_process_zero:  # other ranks' times and logs are not the same
            parts["trainer"] = dataclasses.asdict(state)
            parts["trainer"]["stateful_callbacks"]["TrainerControl"] = control.state()
        self._checkpointer.save(state.global_step, parts)


def _parts(*, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any) -> dict[str, State]:
    parts = {
        "model": model,
        "optimizer": stateful_optimizer(model, optimizer),
        "scheduler": lr_scheduler,
    }
    scaler = getattr(optimizer, "scaler", None)
    return parts if scaler is None else parts | {"scaler": scaler}
