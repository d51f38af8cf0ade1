"""How long a new process takes to its first token, in `bench_engine.py`.

Once with kernels to compile and once with those that the first has compiled. Imports, weights and one
step of one row are part of it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FIRST_TOKEN = """
import sys, time
started = time.perf_counter()
from actors.engine_spec import EngineSpec, make_engine, pack_folder
from rollout.engine import run_to_end
from rollout.request import RolloutRequest
from rollout.sampling import SamplingParams
spec = EngineSpec(sys.argv[1], proposer="none", num_slots=1, context_len=64)
engine = make_engine(spec)
engine.load(engine.prepare(pack_folder(spec)), version=0, digest="")
sampling = SamplingParams(max_new_tokens=1)
run_to_end(engine, [RolloutRequest("r", "g", "p", 0, (1, 2, 3), sampling)])
print(time.perf_counter() - started)
"""
TIMEOUT_S = 300


def startup_seconds(folder: Path) -> dict[str, float]:
    """`compiling` and `cached`."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        command = [sys.executable, "-c", FIRST_TOKEN, str(folder)]
        seconds = [
            float(
                subprocess.run(
                    command,
                    env=environment,
                    cwd=Path(__file__).resolve().parent.parent,
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                ).stdout
            )
            for _ in range(2)
        ]
    return dict(zip(("compiling", "cached"), seconds))
