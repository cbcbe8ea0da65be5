"""A clock that stands still until a test moves it; put in the place of the module `time`."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now
