"""The algorithm: requests in, samples out, drawn exactly from the policy's law. No Ray here.

admission           whether a request can be served at all
checkpoint          a Hugging Face checkpoint folder: config, weights, tokenizer
conditions          what decides a position's law besides its logits
decoder             sizes, tensor names and quantised parts of a dense decoder
draft               proposed tokens, each with the law it was drawn from
draft_len           how many tokens to draft, from measured costs and acceptance
draft_tree          growing a tree of the most probable continuations
drafting            making a draft that verification can trust
engine              the protocol of an engine
enumerate           every outcome of a sampling procedure with its exact probability
errors              the tree of everything raised by name
grammar             what the generated tokens must spell, as masks
law                 logits and sampling parameters -> the target law of each position
ledger              one fate for every sample
llguidance_grammar  JSON schemas and regular expressions by llguidance
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
verdict             what a verification decides for one row and round
verify              how much of a draft the target law keeps: the rule for each kind
verify_block        block verification of sampled drafts
verify_points       verification of point masses, chain or tree
verify_positions    verification of sampled drafts, position by position
watch               exactness watched in production
"""

__all__ = [
    "admission",
    "checkpoint",
    "conditions",
    "decoder",
    "draft",
    "draft_len",
    "draft_tree",
    "drafting",
    "engine",
    "enumerate",
    "errors",
    "grammar",
    "law",
    "ledger",
    "llguidance_grammar",
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
    "verdict",
    "verify",
    "verify_block",
    "verify_points",
    "verify_positions",
    "watch",
]
