"""The algorithm: requests in, samples out, drawn exactly from the policy's law. No Ray here.

admission           whether a request can be served at all
checkpoint          a Hugging Face checkpoint folder: config, weights, tokenizer
decoder             sizes, tensor names and quantised parts of a dense decoder
draft               proposed tokens, each with the law it was drawn from
draft_len           how many tokens to draft, from measured costs and acceptance
engine              the protocol of an engine
enumerate           every outcome of a sampling procedure with its exact probability
errors              the tree of everything raised by name
law                 logits and sampling parameters -> the target law of each position
ledger              one fate for every sample
native_engine       rounds of draft, score, verify, commit over a ragged batch of rows
packing             weights as they travel: packed once, checked by every receiver
policy              the protocol of a model with cache slots
probe               a fixed batch of tokens that every published model is compared on
proposer            the protocol of whoever drafts
request             what goes into an engine and what comes out
row                 a sequence in flight
sampling            sampling parameters and the meaning of their edge values
stop_text           stop strings over token ids
streams             the randomness of one row, keyed by what it is for
table_policy        a policy whose law is a known table
transformer_policy  a dense decoder with its own cache
verify              how much of a draft the target law keeps
"""

__all__ = [
    "admission",
    "checkpoint",
    "decoder",
    "draft",
    "draft_len",
    "engine",
    "enumerate",
    "errors",
    "law",
    "ledger",
    "native_engine",
    "packing",
    "policy",
    "probe",
    "proposer",
    "request",
    "row",
    "sampling",
    "stop_text",
    "streams",
    "table_policy",
    "transformer_policy",
    "verify",
]
