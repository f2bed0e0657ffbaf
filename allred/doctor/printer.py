"""Who prints, and how: one rank, lines for a person or JSON objects for a program."""

from allred.bench import setting
from allred.doctor.line import Line, exit_code, rendered, summary


class Printer:
    """Prints lines as they come, if this rank is the one that speaks, and keeps them for the summary."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.speaks = setting.first_rank()
        self.lines: list[Line] = []

    def text(self, lines: list[Line]) -> str:
        """The lines as they are printed."""
        return "\n".join(rendered(line, self.as_json) for line in lines)

    def add(self, lines: list[Line]) -> None:
        """Print lines."""
        self.lines += lines
        if self.speaks and lines:
            print(self.text(lines), flush=True)

    def end(self) -> int:
        """Print the summary, for a person; the exit code."""
        if self.speaks and not self.as_json:
            print(summary(self.lines), flush=True)
        return exit_code(self.lines)
