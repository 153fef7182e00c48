"""The parts that all benches share: turns, processes, medians, tables, options, and the file with every figure.

How a bench is built
====================

A bench is a folder with the modules ``options`` (its settings, light to import), ``workload`` (the work of every
contender), ``contenders`` (one module a library, imported in its own process), ``report`` (tables, aims, notes) and
``bench`` (its `run`), and a line in the table of `gcore_bench.cli`. The smallest one::

    # options.py
    @dataclass(frozen=True, kw_only=True)
    class CopyOptions(BenchOptions):
        size_mb: Count = 64

    # bench.py
    def run(options: CopyOptions, console: Console) -> None:
        with Session(options, console) as session:
            rounds = Rounds("copy", options.rounds, say=session.say)
            for turn in rounds.turns(("numpy", "torch")):
                spec = Spec(work="gcore_bench.copy.contenders", part="copy", contender=turn.contender,
                            folder=str(session.folder), options=plain(options))
                (row,) = run_children([spec], folder=session.folder).values
                turn.done({turn.contender: row}, f"{row['wall_s']:.3f} s")
            summary = summarise("copy", rounds.runs)
            table = rows_table("copies", summary.rows, [("s", figure("wall_s", ".3f"))])
            session.add("copy", tables=[table], summary=asdict(summary), runs=rounds.runs)

    # contenders.py: what the process of a measurement calls
    def run(spec: Spec) -> dict[str, float]:
        return {"wall_s": ...}

Contenders take turns round after round, so that a busy moment of the machine falls on all of them (`Rounds`). A
measurement has a process of its own: a new interpreter whose memory is watched (`run_children`), or one forked from a
server that has imported torch once (`run_processes`). Its figures return as JSON. Figures are medians over all rounds
(`summarise`), and ratios to a peer or a physical limit are medians of the ratios within each round (`paired_ratio`).
"""
