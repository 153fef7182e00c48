"""Large data stays on disk: the same prompts as of small files, in the same order, in little memory; and mixtures."""

import csv
import json
import pickle
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from command_line import write_rows

from gcore_controller import PromptLoader
from gcore_llm import prompts
from gcore_llm.config import TrainConfig
from gcore_llm.prompts import PromptSets, load_files
from gcore_llm.sections import DataConfig, TrainerConfig
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import Prompt, PromptImages
from gcore_runs import UserError, inputs, open_rows
from gcore_runs.data.rows import RowSource

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
DOUBLED = "{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def loaded(
    monkeypatch: pytest.MonkeyPatch, large_bytes: int, tokenizer: Any, **settings: Any
) -> PromptSets:
    monkeypatch.setattr(inputs, "LARGE_BYTES", large_bytes)
    return load_files(DataConfig(**settings), tokenizer, seed=3)


def rows_of(count: int, length: int = 9) -> list[dict[str, Any]]:
    """Rows of rising lengths, some of them not ASCII, and one with messages."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"{i}+1=" + "9" * (i % length), "answer": i, "mixed": ["a", {"b": i}]}
        for i in range(count)
    ]
    rows[3]["prompt"] = "1½+1=" + "½" * 5
    rows[5]["prompt"] = [{"role": "user", "content": "2+2="}]
    return rows


@pytest.mark.parametrize("template", ["", TEMPLATE, DOUBLED])
def test_on_disk_and_in_memory_are_the_same(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or None
    rows = rows_of(300, length=60)
    if not template:
        rows[5] = rows[4]
    write_rows(Path("p.jsonl"), rows)
    Path("q.jsonl").write_text("\n\n" + "\r\n\n".join(json.dumps(row) for row in rows[:40]) + "\n")
    settings = {"train_files": ("p.jsonl", "q.jsonl"), "max_prompt_length": 45}
    small = loaded(monkeypatch, 2**30, tokenizer, **settings)
    large = loaded(monkeypatch, 0, tokenizer, **settings)
    assert isinstance(small.train, list)
    assert not isinstance(large.train, list)
    assert list(large.train) == small.train
    assert large.val == small.val
    assert large.num_too_long == small.num_too_long > 50
    assert small.longest <= large.longest <= 45
    # Nodes of a cluster get paths, not rows.
    pickled = pickle.dumps(large.train)
    assert len(pickled) < 60_000
    assert pickle.loads(pickled)[34] == small.train[34]


def test_most_prompts_are_not_tokenized_and_lengths_are_kept(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    tokenizer = tiny_tokenizer()
    write_rows(
        Path("p.jsonl"),
        [{"prompt": f"{i}+1="} for i in range(2000)]
        + [{"prompt": "9" * 100}, {"prompt": "½=" * 9}],
    )
    tokenized: list[int] = []
    whole = prompts.file_prompts

    def counted(rows: RowSource, numbers: Sequence[int], **own: Any) -> list[Prompt]:
        tokenized.extend(numbers if rows.name != "probe" else ())
        return whole(rows, numbers, **own)

    monkeypatch.setattr(prompts, "file_prompts", counted)
    found = loaded(monkeypatch, 0, tokenizer, train_files=("p.jsonl",), max_prompt_length=50)
    assert {2000, 2001} <= set(tokenized)
    assert len(tokenized) == 2 + len(found.val)
    assert found.num_too_long == 1
    tokenized.clear()
    again = loaded(monkeypatch, 0, tokenizer, train_files=("p.jsonl",), max_prompt_length=50)
    assert len(tokenized) == len(again.val), "the cache has the lengths"
    assert again.train[77] == found.train[77]
    write_rows(Path("p.jsonl"), [{"prompt": "9" * 100}] * 3 + [{"prompt": "1+1="}] * 20)
    assert (
        loaded(
            monkeypatch, 0, tokenizer, train_files=("p.jsonl",), max_prompt_length=50
        ).num_too_long
        == 3
    )
    assert len(list(cache.rglob("*"))) == 5, "two copies and two results in a folder"


def test_tokenizing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LARGE_BYTES", 0)
    write_rows(Path("p.jsonl"), [{"prompt": f"½{i}+1="} for i in range(2500)])
    seen: list[tuple[str, int, int]] = []
    data = DataConfig(train_files=("p.jsonl",), max_prompt_length=50)
    load_files(data, tiny_tokenizer(), seed=3, progress=lambda *counts: seen.append(counts))
    assert seen == [("tokenizing p.jsonl", done, 2500) for done in (1000, 2000, 2500)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"prompt": "1+1=",', r"p.jsonl:6 is not JSON"),
        ('["prompt"]', r"p.jsonl:6 is list; expected a JSON object"),
        (
            '{"question": "1+1="}',
            r"p.jsonl: row 5 has no column 'prompt' \(data.prompt_key\); it has 'question'",
        ),
        ('{"prompt": ""}', r"p.jsonl: prompt of row 5 is empty"),
        ('{"prompt": 5}', r"p.jsonl: prompt of row 5 is 5; expected text"),
    ],
)
def test_wrong_rows_are_found_before_the_run(
    line: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = '{"prompt": "1+1="}\n'
    Path("p.jsonl").write_text(good * 4 + "\n" + line + "\n" + good)
    with pytest.raises(UserError, match=expected):
        loaded(monkeypatch, 0, tiny_tokenizer(), train_files=("p.jsonl",))


@pytest.mark.parametrize("large_bytes", [0, 2**30])
def test_formats_and_patterns(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LARGE_BYTES", large_bytes)
    rows = [{"prompt": f"{i}+1=", "answer": i} for i in range(50)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table.slice(0, 20), "part-0.parquet")
    pyarrow.parquet.write_table(table.slice(20), "part-1.parquet")
    with pyarrow.ipc.new_file("rows.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=7)
    with pyarrow.ipc.new_stream("stream.arrow", table.schema) as stream:
        stream.write_table(table)
    with Path("rows.csv").open("w") as text:
        writer = csv.DictWriter(text, ["prompt", "answer"])
        writer.writeheader()
        writer.writerows(rows)
    for source in ("part-*.parquet", "rows.arrow", "stream.arrow", "rows.csv"):
        files = open_rows(source)
        assert [row for file in files for row in file.rows] == rows, source
        assert files[-1].rows[-1] == rows[-1]
    assert [file.name for file in open_rows("part-*.parquet")] == [
        "part-0.parquet",
        "part-1.parquet",
    ]
    with pytest.raises(
        UserError, match=r"data file no-\*.csv does not exist: no file matches the pattern"
    ):
        open_rows("no-*.csv")
    with pytest.raises(UserError, match=r"data file rows\.txt does not exist"):
        open_rows("rows.txt")


@pytest.mark.parametrize("large_bytes", [0, 2**30])
def test_computed_columns(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"question": f"{i}+1=", "answer": f"{i} plus 1\n#### {i + 1} ", "meta": {"level": i}}
        for i in range(30)
    ]
    write_rows(Path("p.jsonl"), rows)
    columns = {
        "answer": "answer.split('####')[-1].strip()",
        "level": "meta.level * 2",
        "text": "question ~ row['answer'][:1]",
    }
    found = loaded(
        monkeypatch,
        large_bytes,
        tiny_tokenizer(),
        train_files=("p.jsonl",),
        prompt_key="text",
        columns=columns,
    )
    for prompt in (*found.train, *found.val):
        number = prompt.row["meta"]["level"]
        assert prompt.text == f"{number}+1={str(number)[0]}"
        assert {**prompt.row, "meta": None} == {
            "question": f"{number}+1=",
            "answer": str(number + 1),
            "meta": None,
            "level": 2 * number,
            "text": prompt.text,
        }
    for expression, expected in (
        ("answer[", r"data.columns.answer is 'answer\['; expected a Jinja expression: "),
        ("missing", r"p.jsonl: row 1: 'missing' is undefined \(data.columns.answer is 'missing'\)"),
        ("answer.no.more", r"p.jsonl: row 1: 'str object' has no attribute 'no'"),
        (
            "answer.__class__.__mro__",
            r"p.jsonl: row 1: access to attribute '__class__' of 'str' object is unsafe",
        ),
    ):
        with pytest.raises(UserError, match=expected):
            loaded(
                monkeypatch, large_bytes, tiny_tokenizer(), train_files=("p.jsonl",), prompt_key="question",
                columns={"answer": expression},
            )  # fmt: skip


@pytest.mark.parametrize("large_bytes", [0, 2**30])
def test_mixtures_by_weights(large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("a", 20), ("b", 200), ("c", 100)):
        write_rows(
            Path(f"{name}.jsonl"), [{"prompt": f"{i}+1=", "source": name} for i in range(count)]
        )
    files = ("a.jsonl", "[bc].jsonl", "b.jsonl")
    Path("[bc].jsonl").write_text(Path("c.jsonl").read_text())
    found = loaded(
        monkeypatch, large_bytes, tiny_tokenizer(), train_files=files, weights=(3.0, 2.0, 5.0)
    )
    assert (len(found.train), len(found.val)) == (320 - 32, 32)
    drawn = [prompt.row["source"] for _, prompt in PromptLoader(found.train, seed=1).take(2000)]
    assert Counter(drawn) == {"a": 600, "b": 1000, "c": 400}
    for weights in ((1.0,), (1.0, 0.0, 1.0), (1.0, -1.0, 5.0), (1.0, 1.0, 1e9)):
        with pytest.raises(
            UserError, match=r"expected (3 numbers, one for each of data|a finite number above 0)"
        ):
            loaded(monkeypatch, large_bytes, tiny_tokenizer(), train_files=files, weights=weights)
    write_rows(Path("a.jsonl"), [{"prompt": "9" * 70}])
    with pytest.raises(
        UserError,
        match=r"data file a.jsonl has no rows left to train on; expected some, as it is in",
    ):
        loaded(
            monkeypatch,
            large_bytes,
            tiny_tokenizer(),
            train_files=files,
            weights=(3.0, 2.0, 5.0),
            max_prompt_length=64,
        )


def test_images_of_an_object_store_are_read_when_they_are_needed() -> None:
    url = "memory://pictures/a.png"
    [source] = inputs.image_sources({"image": {"path": url}}, "image", Path("data"), "row 1")
    images = PromptImages(model="", sources=(source, b"own"))
    with pytest.raises(FileNotFoundError):
        images.encoded()
    fsspec.filesystem("memory").pipe(url, b"stored")
    assert images.encoded() == (b"stored", b"own")
    assert PromptImages.from_state(images.state()) == images


def test_epochs() -> None:
    data, trainer = (
        DataConfig(train_batch_size=8),
        TrainerConfig(total_epochs=1.5, total_training_steps=7),
    )
    assert TrainConfig(data=data, trainer=trainer).over_rows(100).trainer.total_training_steps == 19
    assert TrainConfig(data=data).over_rows(100).trainer.total_training_steps == 200
