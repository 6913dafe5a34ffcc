from __future__ import annotations

import io

import pytest

from megatron_stare.report.console import (
    Clock,
    LiveConsole,
    PlainConsole,
    describe_step,
    duration,
    open_console,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.2, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m"), (273_600, "3d04h")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_a_step_is_one_plain_line_in_a_log():
    stream = io.StringIO()
    _, console = open_console(20, 0, stream)
    assert isinstance(console, PlainConsole)
    console.status("sampling")
    row = {"step": 4, "reward/mean": 0.5, "entropy": 0.31, "loss": -0.02, "grad_norm": None}
    console.step(row | {"stare/W": 1.1, "stare/open": 1.0, "eval/reward": 0.25}, 2.5)
    (line,) = stream.getvalue().splitlines()
    assert line == (
        "step 5/20  reward 0.500  entropy 0.310  loss -0.02  grad norm nan  W 1.1 open  "
        "eval/reward 0.25  2.5s  left -"
    )


def test_figures_that_are_missing_are_left_out():
    assert describe_step({"step": 0, "loss": 1.0}) == "loss 1"
    assert describe_step({"step": 0}) == ""
    assert describe_step({"step": 0, "stare/W": 1.0, "stare/open": False}) == "W 1 closed"


def test_a_terminal_gets_a_bar_with_phase_and_figures():
    terminal = Terminal()
    _, console = open_console(20, 5, terminal)
    assert isinstance(console, LiveConsole)
    console.status("sampling")
    console.step({"step": 5, "entropy": 0.42}, 1.0)
    console.close()
    shown = terminal.getvalue()
    assert "step 6/20" in shown
    assert "entropy 0.420" in shown


def test_time_left_is_by_the_steps_of_late():
    clock = Clock(10)
    assert clock.left(0) is None
    clock._recent.extend([100.0, 2.0, 2.0])  # the first step compiles and loads
    assert clock.left(3) == 14.0
    assert clock.left(10) == 0.0
