"""vLLM as an engine: our law, verification and proposers at its plug-in points.

engine           vLLM behind the engine protocol
executor         its workers as processes, where a model is split over several
launch           vLLM's engine with our plug-in, in this process
layout           weights as vLLM reads them, and a checkpoint in W8A8
pass_through     new weights from GPU to GPU, by vLLM's own back-ends
patches          what is repaired in vLLM itself, until upstream has done the same
proposer         our proposers where vLLM drafts
ranks            which of several workers has the rows, and what it tells the others
rounds           rows over vLLM's steps: conditions, law, verification, draft lengths
scheduled        what vLLM ran of each request in one forward
shared_update    a weight update in shared memory
stock            vLLM as it is, for the audit
support          what of an engine spec vLLM can serve exactly, and which vLLM
verifier         our law and verification where vLLM samples
weight_transfer  a backend of vLLM's weight-transfer API, over shared memory
worker           what vLLM's worker is asked by our engine
"""

__all__ = [
    "engine",
    "executor",
    "launch",
    "layout",
    "pass_through",
    "patches",
    "proposer",
    "ranks",
    "rounds",
    "scheduled",
    "shared_update",
    "stock",
    "support",
    "verifier",
    "weight_transfer",
    "worker",
]
