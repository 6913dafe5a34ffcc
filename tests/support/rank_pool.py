"""Real processes that share gloo groups and stay: many calls for the price of one start."""

from __future__ import annotations

import importlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class RankPool:
    """`ranks` processes; `call` runs a function on the first few of them, in one group.

    Start it once per test module (`with RankPool(4, tmp_path) as pool`); leaving the block ends them.
    """

    def __init__(self, ranks: int, directory: Path, timeout: float = 60.0) -> None:
        self._timeout = timeout
        self._logs = [directory / f"rank{rank}.log" for rank in range(ranks)]
        self._ranks: list[subprocess.Popen] = []
        self._answers: list[queue.Queue] = []
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank, log in enumerate(self._logs):
            command = [sys.executable, "-m", "tests.support.rank_pool", str(rank), str(ranks), str(directory)]
            with log.open("w") as err:
                process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                )
            self._ranks.append(process)
            self._answers.append(queue.Queue())
            threading.Thread(target=self._read, args=(process, self._answers[-1]), daemon=True).start()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()
            process.stdin.close()

    def call(self, target: str, arguments: list[dict[str, Any]]) -> list[Any]:
        """`target` ("package.module:function") on len(arguments) ranks; what each returned.

        Each is called with its group and its own arguments, which travel as JSON, as results do.
        """
        size = len(arguments)
        for process, own in zip(self._ranks, arguments, strict=False):
            process.stdin.write(json.dumps({"target": target, "size": size, "arguments": own}) + "\n")
            process.stdin.flush()
        return [self._answer(rank) for rank in range(size)]

    def _answer(self, rank: int) -> Any:
        try:
            line = self._answers[rank].get(timeout=self._timeout)
        except queue.Empty:
            line = ""
        if not line:
            raise AssertionError(f"rank {rank} gave no answer:\n{self._logs[rank].read_text()[-3000:]}")
        return json.loads(line)

    @staticmethod
    def _read(process: subprocess.Popen, answers: queue.Queue) -> None:
        for line in process.stdout:
            answers.put(line)
        answers.put("")  # it ended


def main(rank: int, ranks: int, directory: str) -> None:
    """One rank: a line in, a call, a line out."""
    import torch.distributed as dist

    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, ranks + 1)}
    for line in sys.stdin:
        request = json.loads(line)
        module, function = request["target"].split(":")
        call = getattr(importlib.import_module(module), function)
        print(json.dumps(call(groups[request["size"]], **request["arguments"])), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
