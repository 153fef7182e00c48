"""A small environment of verifiers: sums, with the share of right digits as the reward."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false, reportUntypedBaseClass=false

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward(weight=1.0)
    async def right_digits(self, trace: vf.Trace) -> float:
        digits = set(trace.last_reply or "")
        return sum(digit in digits for digit in self.data.answer) / len(self.data.answer)


class SumsTaskset(vf.Taskset[SumsTask, vf.TasksetConfig]):
    def load(self) -> list[SumsTask]:
        tasks: list[SumsTask] = []
        for number in range(40):
            data = SumsData(prompt=f"{number}+{number % 7}=", answer=str(number + number % 7))
            tasks.append(SumsTask(data, self.config.task))
        return tasks


__all__ = ["SumsTaskset"]
