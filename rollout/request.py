"""What goes into an engine and what comes out: token ids in, token ids out.

Text appears nowhere here; it is for people and for stop strings.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rollout.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Mode = Literal["quantised", "full", "lossless"]


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample to be generated.

    `prompt_id` and `sample_index` name the sample's randomness (`rollout.streams`): two requests
    of one run never share both, also when a prompt is visited again in a later step.
    """

    id: str
    group_id: str
    prompt_id: str
    sample_index: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    run_seed: int = 0
    attempt: int = 0
    """How often it was sent before. A request that is sent again uses the same uniforms, and what was
    learnt from the first attempt may choose how much is drafted: drawn drafts are left out then."""


@dataclass(slots=True)
class SpecCounters:
    """Speculation of one sample or of many, as counts: every ratio is a sum over a sum.

    `verified` counts draft tokens that a target forward scored; `accepted` those of them that were
    emitted. A token after a stop inside an accepted run is verified, not accepted, not emitted.
    Emitted tokens = accepted + corrections + bonuses + plain.
    """

    rounds: int = 0
    """Target forwards this row took part in."""
    drafted: int = 0
    """Draft tokens proposed, those that were then not worth scoring included."""
    verified: int = 0
    accepted: int = 0
    corrections: int = 0
    """Tokens drawn after a refusal."""
    bonuses: int = 0
    """Tokens drawn after a full acceptance."""
    plain: int = 0
    """Tokens of rounds without a draft."""
    reached: list[int] = field(default_factory=list)
    """Per draft position: how often the verification got there."""
    accepted_by_position: list[int] = field(default_factory=list)
    foretold_reached: int = 0
    """Draft positions reached in rounds whose accepted length was foretold (`rollout.verify`)."""
    foretold_accepted: int = 0
    """Accepted lengths of those rounds, tokens behind a stop included."""
    expected_accepted: float = 0.0
    """What was foretold for them."""
    expected_variance: float = 0.0
    """Upper bound of the variance of accepted - expected, as foretold."""
    pit_counts: list[int] = field(default_factory=list)
    """Emitted tokens by where they fell in the law that verified them (`rollout.watch`)."""
    zero_residual_draws: int = 0
    """Corrections whose residual had no mass by rounding and were drawn from the target law."""

    def add(self, other: "SpecCounters") -> None:
        """Adds another's counts to these."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if not isinstance(mine, list):
                setattr(self, name, mine + theirs)
                continue
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count

    @property
    def emitted(self) -> int:
        return self.accepted + self.corrections + self.bonuses + self.plain

    @property
    def num_reached(self) -> int:
        return sum(self.reached)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / verified; None when nothing was verified."""
        return self.accepted / self.verified if self.verified else None

    @property
    def tokens_per_target_step(self) -> float | None:
        """Emitted tokens / row-rounds; 1 for plain decoding."""
        return self.emitted / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds on the engine's monotonic clock."""

    queued_s: float = 0.0
    """From submission to admission into a slot."""
    generating_s: float = 0.0
    """From admission to the last token."""


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """A finished sample. All per-token lists have the length of `token_ids`."""

    request: RolloutRequest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Under the law that was sampled."""
    logprobs_full: tuple[float, ...]
    """Whole vocabulary at the same temperature, before bans, biases, penalties and filters."""
    kept_mass: tuple[float, ...]
    """Full-vocabulary mass of the tokens the sampled law could emit; 1 without bans and filters.
    logprobs = logprobs_full - log kept_mass, unless a bias or penalty changed the odds as well."""
    version_spans: tuple[tuple[int, int], ...]
    """Run-length `(policy version that verified, number of tokens)` in order."""
    finish_reason: FinishReason
    finish_detail: str
    """The stop id or string, the limit that was reached, or the error's sentence."""
    mode: Mode
    weights_digest: str
    """Digest of the weights that verified the last token; empty without one."""
    counters: SpecCounters
    timings: Timings

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids),
            len(self.logprobs),
            len(self.logprobs_full),
            len(self.kept_mass),
            sum(num for _, num in self.version_spans),
        }
        assert len(lengths) == 1, (
            f"per-token lists of {self.request.id} differ in length: {lengths}"
        )

    @property
    def oldest_version(self) -> int | None:
        """The version that ages the sample; None for an empty one."""
        return min((version for version, _ in self.version_spans), default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain types, flat, as written to `samples.jsonl`; `from_json` is its inverse."""
        row = asdict(self)
        request = row.pop("request")
        row["sampling"] = request.pop("sampling")
        return request | row

    @staticmethod
    def from_json(row: dict[str, Any]) -> "RolloutSample":
        request = RolloutRequest(
            id=row["id"],
            group_id=row["group_id"],
            prompt_id=row["prompt_id"],
            sample_index=row["sample_index"],
            prompt_ids=tuple(row["prompt_ids"]),
            sampling=SamplingParams.from_json(row["sampling"]),
            run_seed=row["run_seed"],
            attempt=row["attempt"],
        )
        return RolloutSample(
            request=request,
            token_ids=tuple(row["token_ids"]),
            logprobs=tuple(row["logprobs"]),
            logprobs_full=tuple(row["logprobs_full"]),
            kept_mass=tuple(row["kept_mass"]),
            version_spans=tuple((version, num) for version, num in row["version_spans"]),
            finish_reason=row["finish_reason"],
            finish_detail=row["finish_detail"],
            mode=row["mode"],
            weights_digest=row["weights_digest"],
            counters=SpecCounters(**row["counters"]),
            timings=Timings(**row["timings"]),
        )
