"""Lists and describes transactional ids (ListTransactions, DescribeTransactions; KIP-664). Read-only.

A deposed coordinator that does not know it yet tells their old state. Nothing is lost by that, because every change
goes through the coordinator, which checks again.
"""

from collections.abc import Generator

from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.terms import TransactionTerms
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import transactions as t


def describe(terms: TransactionTerms, transactional_id: str) -> t.DescribedTransaction:
    """Describe a transactional id. TRANSACTIONAL_ID_NOT_FOUND: no producer has it."""
    term = terms.of_key(transactional_id)
    if isinstance(term, ErrorCode):
        return t.DescribedTransaction(term, transactional_id)
    coordinated = term.ids.get(transactional_id)
    known = None if coordinated is None else coordinated.current
    if known is None:
        return t.DescribedTransaction(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, transactional_id)
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(known.partitions):
        topics.setdefault(topic, []).append(partition)
    return t.DescribedTransaction(
        ErrorCode.NONE,
        transactional_id,
        known.state.value,
        known.timeout_ms,
        known.started_ms if known.state is TransactionState.ONGOING or known.is_ending else -1,
        known.producer_id,
        known.producer_epoch,
        [t.TransactionTopic(name, indexes) for name, indexes in topics.items()],
    )


def list_transactions(
    terms: TransactionTerms, body: t.ListTransactionsRequest, now_ms: int
) -> Generator[None, None, t.ListTransactionsResponse]:
    """List the transactional ids that this broker coordinates. `now_ms`: the wall time.
    COORDINATOR_LOAD_IN_PROGRESS: there may be more."""
    names = {state.value for state in TransactionState}
    wanted = names.intersection(body.state_filters)
    unknown = sorted(set(body.state_filters) - names)
    producer_ids = frozenset(body.producer_id_filters)
    listed = []
    for term in terms.loaded():
        for transactional_id, coordinated in term.ids.items():
            known = coordinated.current
            if known is None:
                continue
            if body.state_filters and known.state.value not in wanted:
                continue
            if producer_ids and known.producer_id not in producer_ids:
                continue
            is_open = known.state is TransactionState.ONGOING or known.is_ending
            if body.duration_filter_ms >= 0 and not (is_open and now_ms - known.started_ms > body.duration_filter_ms):
                continue
            listed.append(t.ListedTransaction(transactional_id, known.producer_id, known.state.value))
        yield
    code = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if terms.is_loading else ErrorCode.NONE
    return t.ListTransactionsResponse(0, code, unknown, listed[: t.MAX_TRANSACTIONS])
