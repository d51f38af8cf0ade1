"""The algorithm: requests in, samples out, drawn exactly from the policy's law. No Ray here.

acceptance          how likely drafted tokens are to be accepted
admission           whether a request can be served at all
asking              whether asking the proposer is worth its seconds
checkpoint          a Hugging Face checkpoint folder: config, weights, tokenizer
compiled_policy     the decoder on compiled kernels, with a paged cache
compiled_weights    weights in the layout of the compiled kernels
conditions          what decides a position's law besides its logits
decode_graphs       decode rounds recorded once a shape and replayed
decoder             sizes, tensor names and quantised parts of a dense decoder
decoder_forward     one forward of a dense decoder: tensors in, tensors out
decoder_weights     weights layer by layer, maps of one input stacked
draft               proposed tokens, each with the law it was drawn from
draft_len           how many tokens to draft, from measured costs and acceptance
draft_price         the chance at which a drafted token is worth scoring
draft_tree          growing a tree of the most probable continuations
drafting            making a draft that verification can trust
engine              the protocol of an engine
enumerate           every outcome of a sampling procedure with its exact probability
errors              the tree of everything raised by name
grammar             what the generated tokens must spell, as masks
graph_capture       recording what a function does to fixed memory: CUDA graphs, a tape
kernels             the compiled CPU kernels (csrc/), built for this machine
law                 logits and sampling parameters -> the target law of each position
law_pass            unnormalised weights of laws from logits, compiled or by torch
ledger              one fate for every sample
llguidance_grammar  JSON schemas and regular expressions by llguidance
lossless_policy     two models over one cache: quantised weights draft for full precision
mtp_policy          a policy with an MTP head beside it, which reads its hidden states
mtp_weights         the tensors of an MTP head: names, shapes, their check, their file
native_engine       rounds of draft, score, verify, commit over a ragged batch of rows
packing             weights as they travel: packed once, checked by every receiver
paged_cache         which pages of a cache belong to which slot
policy              the protocol of a model with cache slots
probe               a fixed batch of tokens that every published model is compared on
proposer            the protocol of whoever drafts
realised            whether drafting pays by the clock alone
request             what goes into an engine and what comes out
round_cost          what one round did and took
row                 a sequence in flight
row_round           what every engine does to its rows in a round
sampling            sampling parameters and the meaning of their edge values
scheduler           who runs what in a round, and room in the cache for it
smoothing           the same decoder with its outlier channels in the weights
step_cost           what a forward costs by its number of tokens, as measured
stop_text           stop strings over token ids
stragglers          what a token of each row is worth while a batch drains
streams             the randomness of one row, keyed by what it is for
table_mtp           a policy and its MTP head that are tables
table_policy        a policy whose law is a known table
transformer_policy  a dense decoder with its own cache
tree_yield          whether rounds of draft trees beat rounds of chains
verdict             what a verification decides for one row and round
verify              how much of a draft the target law keeps: the rule for each kind
verify_block        block verification of sampled drafts
verify_points       verification of point masses, chain or tree
verify_positions    verification of sampled drafts, position by position
vocabulary          whether the ids of two checkpoints stand for the same tokens
watch               exactness watched in production
"""

__all__ = [
    "acceptance",
    "admission",
    "asking",
    "checkpoint",
    "compiled_policy",
    "compiled_weights",
    "conditions",
    "decode_graphs",
    "decoder",
    "decoder_forward",
    "decoder_weights",
    "draft",
    "draft_len",
    "draft_price",
    "draft_tree",
    "drafting",
    "engine",
    "enumerate",
    "errors",
    "grammar",
    "graph_capture",
    "kernels",
    "law",
    "law_pass",
    "ledger",
    "llguidance_grammar",
    "lossless_policy",
    "mtp_policy",
    "mtp_weights",
    "native_engine",
    "packing",
    "paged_cache",
    "policy",
    "probe",
    "proposer",
    "realised",
    "request",
    "round_cost",
    "row",
    "row_round",
    "sampling",
    "scheduler",
    "smoothing",
    "step_cost",
    "stop_text",
    "stragglers",
    "streams",
    "table_mtp",
    "table_policy",
    "transformer_policy",
    "tree_yield",
    "verdict",
    "verify",
    "verify_block",
    "verify_points",
    "verify_positions",
    "vocabulary",
    "watch",
]
