"""Threads of a process that computes: as many as the cores it was given, and none that spin on a core
that somebody else needs.

Two OpenMP pools that share cores stall each other for whole scheduler quanta (measured: 8 ms for a
0.05 ms kernel), because a waiting thread of one spins on the core the other needs. vLLM, whose steps
are hundreds of short kernels, waits so often that it gains where its threads do spin: 32 rows of
SmolLM2 in W8A8 on two cores, tokens/s of an actor alone and beside a learner of two threads on the
same two cores (8 seconds each, twice):

    GOMP_SPINCOUNT         0     1,000    10,000   100,000
    alone                519       616       626       635 (and 424)
    beside a learner     469       348       109        50

So they may where their cores are their own, and for so short a time that a learner which is there
after all is no disaster. The settings are read when torch loads, so they are environment variables set
before that.
"""

MOMENT = 1_000
"""Turns of a waiting thread before it sleeps: most of the gain, and a quarter lost where the core is
shared after all."""


def thread_environment(num_cores: int, *, spin: bool = False) -> dict[str, str]:
    """Environment of a process that may use `num_cores` cores; `spin`: waiting threads do so for a
    moment before they sleep."""
    return {
        "OMP_NUM_THREADS": str(num_cores),
        "MKL_NUM_THREADS": str(num_cores),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "GOMP_SPINCOUNT": str(MOMENT if spin else 0),
        "TOKENIZERS_PARALLELISM": "false",
    }
