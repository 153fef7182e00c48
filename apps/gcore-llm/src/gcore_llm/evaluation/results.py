"""The folder of an evaluation: its settings, every response, and the estimates; an interrupted one is continued."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gcore_llm.evaluation.estimators import Answered
from gcore_llm.evaluation.evaluate import EvaluationTask, TextEvaluation, ValSet
from gcore_rollout import Group
from gcore_runs import UserError, json_object, read_jsonl, write_atomically, write_jsonl
from gcore_runs.run_folder import append_json


class Results:
    """Keeps responses as they are scored, and the estimates at the end.

    Args:
        folder: made if there is none.
        identity: what determines the results. `UserError` if the folder has those of another.
        sets: the prompts.
        tokenizer: decodes the responses.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], sets: Sequence[ValSet], tokenizer: Any
    ) -> None:
        self.folder = folder
        self._sets = sets
        self._tokenizer = tokenizer
        self._responses = folder / "responses.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "settings.json"
        if settings.is_file():
            before = json_object(settings.read_text(), str(settings))
            if before != identity:
                changed = next(
                    name
                    for name in {**before, **identity}
                    if before.get(name) != identity.get(name)
                )
                raise UserError(
                    f"out is {folder}; expected another folder: its results are of another {changed}"
                )
        write_atomically(settings, lambda path: path.write_text(json.dumps(identity, indent=1)))
        names = [val_set.name for val_set in sets]
        rows = [row for row in read_jsonl(self._responses) if row["set"] in names]
        # A process that was killed may have left half a line.
        write_jsonl(self._responses, rows)
        self.done: dict[EvaluationTask, Answered] = {}
        """The answers of an earlier call."""
        for row in rows:
            task = EvaluationTask(names.index(row["set"]), row["way"], row["prompt"])
            scores = tuple(response["score"] for response in row["responses"])
            answers = tuple(response["answer"] for response in row["responses"])
            self.done[task] = Answered(scores=scores, answers=answers)

    def add(self, task: EvaluationTask, group: Group) -> None:
        """Append the responses to a prompt."""
        val_set = self._sets[task.set]
        responses = [
            {
                "text": self._tokenizer.decode(response.token_ids, skip_special_tokens=True),
                "score": response.score,
                "answer": response.answer,
                "num_tokens": int(response.token_ids.size),
                "truncated": response.is_truncated,
            }
            for response in group.responses
        ]
        row = {
            "set": val_set.name,
            "way": task.way,
            "prompt": task.prompt,
            "text": val_set.prompts[task.prompt].text,
            "responses": responses,
        }
        append_json(self._responses, row)

    def write(self, evaluation: TextEvaluation) -> None:
        """Write the estimates of each set, and of its data sources, and the metrics by their names in a run."""
        sets: dict[str, dict[str, Any]] = {}
        for name, estimates in evaluation.by_set():
            sets[name] = {key: asdict(estimate) for key, estimate in estimates.items()}
        content = {"sets": sets, "metrics": evaluation.metrics()}
        write_atomically(
            self.folder / "results.json",
            lambda path: path.write_text(json.dumps(content, indent=1)),
        )
