"""What every engine does to its rows in a round, whoever runs the forward.

Drafts are checked, each scored position gets its condition, each row a verdict, and verdicts are
emitted. A row that cannot go on (a broken draft, a grammar that fails, logits without a law) ends as an
error, and its neighbours do not notice.

Shapes: the positions of a round stand row after row, one for the row's last token and one for every
drafted one.
"""

from collections.abc import Callable, Sequence

from rollout.conditions import Condition
from rollout.draft import NO_DRAFT, Draft, check_draft
from rollout.errors import InvalidDraft, InvalidLogits, InvalidRequest
from rollout.law import TargetLaws
from rollout.round_cost import Trial
from rollout.row import Row
from rollout.sampling import SamplingParams
from rollout.verdict import Verdict
from rollout.watch import look_at

NO_CONDITION = Condition(SamplingParams())


def bounded_drafts(
    rows: Sequence[Row], proposed: Sequence[Draft], max_lens: Sequence[int]
) -> list[Draft]:
    """The proposed drafts, each within its length and up to its first stop; of a request that is sent
    again only what was named."""
    drafts = []
    for row, draft, max_len in zip(rows, proposed, max_lens, strict=True):
        draft = draft.truncated(max_len).until(row.request.sampling.stop_ids)
        if row.request.attempt:
            draft = draft.named()
        row.counters.drafted += len(draft)
        drafts.append(draft)
    return drafts


def checked_drafts(rows: Sequence[Row], drafts: Sequence[Draft], vocab_size: int) -> list[Draft]:
    """What is about to be scored, its laws normalised; a row's bad draft ends that row only."""
    checked = []
    for row, draft in zip(rows, drafts, strict=True):
        try:
            checked.append(check_draft(draft, vocab_size))
        except InvalidDraft as error:
            row.finish("error", str(error))
            checked.append(NO_DRAFT)
    return checked


def conditions_of(
    rows: Sequence[Row],
    drafts: Sequence[Draft],
    of_row: Callable[[Row, Draft], Sequence[Condition]],
) -> list[Condition]:
    """The condition of every position."""
    conditions: list[Condition] = []
    for row, draft in zip(rows, drafts):
        try:
            conditions += of_row(row, draft)
        except InvalidRequest as error:
            row.finish("error", str(error))
            conditions += [NO_CONDITION] * (len(draft) + 1)
    return conditions


def verdicts_of(
    rows: Sequence[Row], drafts: Sequence[Draft], judge: Callable[[Row, Draft, int], Verdict]
) -> list[Verdict | None]:
    """A verdict a row, by `judge` with the row's first position; None where the row has no law to go
    on and ends as an error."""
    verdicts: list[Verdict | None] = []
    first = 0
    for row, draft in zip(rows, drafts):
        verdict = None
        if not row.done:
            try:
                verdict = judge(row, draft, first)
            except InvalidLogits as error:
                row.finish("error", str(error))
        verdicts.append(verdict)
        first += len(draft) + 1
    return verdicts


def emit(
    rows: Sequence[Row],
    drafts: Sequence[Draft],
    verdicts: Sequence[Verdict | None],
    laws: TargetLaws,
    *,
    version: int,
    digest: str,
) -> None:
    """Gives each row its verdict's tokens with their log-probabilities, under these weights."""
    indices: list[int] = []
    tokens: list[int] = []
    first = 0
    for draft, verdict in zip(drafts, verdicts):
        if verdict is not None:
            indices += (first, *(first + 1 + node for node in verdict.accepted))
            tokens += verdict.run(draft)
        first += len(draft) + 1
    logprobs, full, kept = laws.logprobs(indices, tokens)
    at = 0
    for row, draft, verdict in zip(rows, drafts, verdicts):
        if verdict is None:
            continue
        part = slice(at, at + verdict.accepted_len + 1)
        num = row.emit(draft, verdict, logprobs[part], full[part], kept[part], version)
        row.weights_digest = digest
        look_at(row, laws, indices[at : at + num])
        at = part.stop


def trials_of(
    rows: Sequence[Row],
    asked_lens: Sequence[int],
    proposed: Sequence[Draft],
    kept: Sequence[Draft],
    verdicts: Sequence[Verdict | None],
) -> tuple[Trial, ...]:
    """What became of each row's draft, for whoever chooses lengths."""
    return tuple(
        Trial(
            row=row,
            asked_len=asked_len,
            draft=draft,
            kept_len=len(scored),
            accepted_len=verdict.accepted_len if verdict else 0,
            next_token=verdict.next_token if verdict else None,
        )
        for row, asked_len, draft, scored, verdict in zip(
            rows, asked_lens, proposed, kept, verdicts, strict=True
        )
    )
