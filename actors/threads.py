"""Threads of a process that computes: as many as the cores it was given, and none that spin.

Two OpenMP pools that share cores stall each other for whole scheduler quanta (measured: 8 ms for a
0.05 ms kernel), because a waiting thread of one spins on the core the other needs. The settings are
read when torch loads, so they are environment variables set before that.
"""


def thread_environment(num_cores: int) -> dict[str, str]:
    """Environment of a process that may use `num_cores` cores."""
    return {
        "OMP_NUM_THREADS": str(num_cores),
        "MKL_NUM_THREADS": str(num_cores),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "GOMP_SPINCOUNT": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
