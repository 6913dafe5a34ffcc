"""The scorer against reward functions that misbehave, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_stare.config.schema import TaskSection
from megatron_stare.errors import UserError
from megatron_stare.tasks import Group, Prompt, Response, Scorer, open_source

pytestmark = pytest.mark.timeout(60)


def task_of(reward: str = "user_functions:misbehave", **options: Any) -> TaskSection:
    return TaskSection(**({"source": "user_functions:rows", "reward": reward} | options))


def groups_of(*texts: str, answer: Any = "x") -> list[Group]:
    """One group for each two texts."""
    responses = [Response([0], [0.0], "stop", 0, text) for text in texts]
    pairs = [responses[i : i + 2] for i in range(0, len(responses), 2)]
    return [Group(Prompt(i, [0], "p", answer), pair) for i, pair in enumerate(pairs)]


def rewards_of(groups: list[Group]) -> list[float]:
    return [response.reward for group in groups for response in group.responses]


def errors_of(groups: list[Group]) -> list[str | None]:
    return [response.reward_error for group in groups for response in group.responses]


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "reward_worker" in " ".join(p.cmdline())]


def wait_until_gone(pids: list[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    log_file = tmp_path_factory.mktemp("log") / "rewards.log"
    with Scorer(task_of(reward_timeout=2.0), log_file=log_file) as made:
        yield made
    assert "the reward saw good" in log_file.read_text()
    assert not children()


def test_good_rewards_are_numbers_of_any_kind(scorer: Scorer) -> None:
    groups = groups_of("good", "numpy", "bool", "other")
    stats = scorer.score(groups)
    assert rewards_of(groups) == [1.0, 0.5, 1.0, 0.0]
    assert errors_of(groups) == [None] * 4
    assert (stats.count, stats.errors, stats.timeouts, stats.messages) == (4, 0, 0, [])


def test_a_reward_that_raises_costs_only_its_own_sample(scorer: Scorer) -> None:
    groups = groups_of("good", "raise", "nan", "none", "text", "exit", "good", "raise")
    stats = scorer.score(groups)
    assert rewards_of(groups) == [1.0, 0, 0, 0, 0, 0, 1.0, 0]
    assert errors_of(groups) == [
        None,
        "ValueError: no verdict on x",
        "ValueError: the reward is nan",
        "TypeError: the reward is a NoneType, not a number",
        "TypeError: the reward is a str, not a number",
        "SystemExit: enough",
        None,
        "ValueError: no verdict on x",
    ]
    assert (stats.errors, stats.timeouts) == (6, 0)
    assert stats.messages[0] == ("ValueError: no verdict on x", 2)


@pytest.mark.parametrize("hang", ["hang", "hang with the interpreter"])
def test_a_reward_that_hangs_is_killed_and_the_others_are_scored(scorer: Scorer, hang: str) -> None:
    groups = groups_of(*["good"] * 150, hang, *["good"] * 149)
    stats = scorer.score(groups)
    assert rewards_of(groups) == [1.0] * 150 + [0.0] + [1.0] * 149
    assert errors_of(groups)[150] == "no reward within 2 s"
    assert (stats.errors, stats.timeouts) == (1, 1)
    assert stats.seconds < 10


@pytest.mark.parametrize(
    ("crash", "reason"), [("crash", "exit code 7"), ("segfault", "signal SIGSEGV")]
)  # fmt: skip
def test_a_reward_that_ends_its_process_costs_only_its_own_sample(
    scorer: Scorer, crash: str, reason: str
) -> None:
    groups = groups_of(*["good"] * 100, crash, "good", *["good"] * 98)
    stats = scorer.score(groups)
    assert rewards_of(groups) == [1.0] * 100 + [0.0] + [1.0] * 99
    assert errors_of(groups)[100] == f"the reward process died ({reason})"
    assert (stats.errors, stats.timeouts) == (1, 0)


def test_slow_rewards_within_the_limit_are_not_timed_out_together(scorer: Scorer) -> None:
    groups = groups_of(*["slow"] * 12)  # 3.6 s of work, each call well within 2 s
    stats = scorer.score(groups)
    assert rewards_of(groups) == [0.25] * 12
    assert stats.errors == 0


def test_a_row_that_cannot_be_pickled_costs_only_its_own_samples(scorer: Scorer) -> None:
    groups = groups_of("good", "good", "good", "good")
    groups[0].prompt.answer = threading.Lock()
    scorer.score(groups)
    assert rewards_of(groups) == [0.0, 0.0, 1.0, 1.0]
    assert "cannot be sent" in str(errors_of(groups)[0])


def test_workers_killed_between_two_batches_are_replaced(scorer: Scorer) -> None:
    pids = [process.pid for process in children()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pids)
    groups = groups_of(*["good"] * 40)
    assert scorer.score(groups).errors == 0
    assert len(children()) == 2


def test_what_a_hung_reward_started_is_killed_with_it(scorer: Scorer, tmp_path: Path) -> None:
    groups = groups_of("hang with a child", answer=str(tmp_path / "pid"))
    assert scorer.score(groups).timeouts == 1
    assert wait_until_gone([int((tmp_path / "pid").read_text())])


def test_scoring_nothing_is_fine(scorer: Scorer) -> None:
    assert scorer.score([]).count == 0


def test_thousands_of_cheap_rewards_cost_little() -> None:
    with Scorer(task_of("megatron_stare.tasks.sums:reward")) as scorer:
        groups = groups_of(*["23+24"] * 4000, answer="47")
        stats = scorer.score(groups)
    assert rewards_of(groups) == [1.0] * 4000
    assert stats.seconds / stats.count < 1e-3  # about 5e-5 on a quiet machine


def test_reasoning_gym_rows_are_scored_in_the_workers(tokenizer: Any) -> None:
    task = task_of("reasoning_gym", source="reasoning_gym:chain_sum", size=4)
    source = open_source(task, tokenizer, 0)
    prompts = [source[i] for i in range(4)]
    groups = [Group(p, [Response([0], [0.0], "stop", 0, t) for t in (p.answer, "none")]) for p in prompts]
    with Scorer(task) as scorer:
        assert scorer.score(groups).errors == 0
    assert rewards_of(groups) == [1.0, 0.0] * 4


def test_a_reward_that_cannot_be_loaded_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    (tmp_path / "half_written.py").write_text("def reward(x, y):\n    return 1.0 +\n")
    (tmp_path / "dying.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="half_written cannot be imported: SyntaxError"):
        Scorer(task_of("half_written:reward"))
    with pytest.raises(UserError, match=r"the reward process died \(exit code 3\)"):
        Scorer(task_of("dying:reward"))
    assert children() == before


def test_closing_stops_a_scoring_under_way_and_leaves_no_process() -> None:
    before = children()
    scorer = Scorer(task_of(reward_timeout=60.0))
    groups = groups_of("hang", "hang")
    thread = threading.Thread(target=scorer.score, args=(groups,))
    thread.start()
    time.sleep(0.3)
    pids = [process.pid for process in children() if process not in before]
    scorer.close()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert errors_of(groups) == ["scoring was stopped"] * 2
    assert len(pids) == 2 and wait_until_gone(pids)
    scorer.close()  # again is fine


def test_workers_ignore_the_schedulers_sigterm(scorer: Scorer) -> None:
    before = {process.pid for process in children()}
    for pid in before:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert scorer.score(groups_of("good", "good")).errors == 0
    assert {process.pid for process in children()} == before


PARENT = """
import sys, threading
sys.path.append({here!r})
from megatron_stare.config.schema import TaskSection
from megatron_stare.tasks import Group, Prompt, Response, Scorer
import psutil
task = TaskSection(source="user_functions:rows", reward="user_functions:misbehave", reward_timeout=600.0)
scorer = Scorer(task)
texts = ["hang with the interpreter", "hang"]
group = Group(Prompt(0, [0], "p", "x"), [Response([0], [0.0], "stop", 0, text) for text in texts])
threading.Thread(target=scorer.score, args=([group],), daemon=True).start()
print(*[p.pid for p in psutil.Process().children()], flush=True)
sys.stdin.read()
"""


def test_workers_die_with_a_killed_parent_even_while_they_hang() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(here=str(Path(__file__).parent))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.3)  # into the hanging calls
    parent.kill()
    parent.wait()
    assert wait_until_gone(pids)
