"""Complete runs, their options, their records, and the `rollout` command.

arithmetic        short sums with a verifiable reward
audit             `rollout audit`: is this engine exact?
audit_enumerated  joint laws on known tables, computed through the real engine
audit_faults      planted faults that an audit must catch
audit_sampled     tests of a real engine on a real model
audit_statistics  the tests' statistics: p-values, powers
ceilings          what bytes and bandwidth allow at one row, and what drafts make of it
certificate       the outcome of an audit, as JSON and as a page
cli               the `rollout` command
clusters          named clusters on this machine
config            every option of a run, its default and what it does
doctor            whether this installation can run, and what will be slow
grpo              asynchronous GRPO on rollouts from a cluster
ladder            what quantisation and speculation each buy, on the run's own prompts
ladder_vllm       the ladder on vLLM
live              a run as it happens, in the terminal
mtp_head          the MTP head as a module to train
mtp_start         an MTP head for a run that brings none
mtp_training      the loss of an MTP head, and its steps
mtp_trunk         what the policy makes of recorded rollouts, for its MTP head to learn
noisy_copy        a draft model for an audit that names none
page              what every HTML page is made of
passport          what a run was
plan              `rollout plan`: ceilings of a model on a machine, and whether a fleet fits
recorded_rollouts rollouts in a file
report            a run folder -> one HTML page
run               `rollout run`, recorded in a run folder
run_folder        the folder of one run, and where it can go on from
sink              the one writer of metrics: JSONL first, Weights & Biases behind it
smollm2           SmolLM2-135M-Instruct from the package that ships it
stop_request      Ctrl-C and SIGTERM as a wish to stop at the next whole step
summary           the closing table of a run
train_mtp         `rollout train-mtp`: an MTP head from recorded rollouts
"""

__all__ = [
    "arithmetic",
    "audit",
    "audit_enumerated",
    "audit_faults",
    "audit_sampled",
    "audit_statistics",
    "ceilings",
    "certificate",
    "cli",
    "clusters",
    "config",
    "doctor",
    "grpo",
    "ladder",
    "ladder_vllm",
    "live",
    "mtp_head",
    "mtp_start",
    "mtp_training",
    "mtp_trunk",
    "noisy_copy",
    "page",
    "passport",
    "plan",
    "recorded_rollouts",
    "report",
    "run",
    "run_folder",
    "sink",
    "smollm2",
    "stop_request",
    "summary",
    "train_mtp",
]
