"""Every option of the source and the sink, with the tests of its effect; a new option needs one as well."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from minibroker.client.security import KAFKA_NAMES
from minibroker.spark_jobs.source.options import READ_OPTIONS, WRITE_OPTIONS

TESTS = Path(__file__).parents[2]

BATCH, STREAM, WRITE = (f"spark/test_spark_{name}.py" for name in ("batch", "stream", "write"))
EXACTLY_ONCE, COPY = "spark/test_spark_exactly_once.py", "spark/copy_stream.py"
READER = "unit/spark_jobs/test_spark_stream_reader.py"
RESOLVING = "unit/spark_jobs/test_spark_reading.py"
PARSING = "unit/spark_jobs/test_spark_options.py"

BOUNDS = "test_bounds_and_splits_prune_what_is_read"
FINDING = "test_topics_are_found_by_name_by_pattern_and_by_partition"
WAITING = "test_a_batch_waits_for_enough_records_or_for_its_time"
LIMITED = "test_batches_keep_to_the_limit_and_a_restart_goes_on_from_the_checkpoint"
WITH_AN_ID = "test_a_write_with_an_id_is_not_repeated_and_a_failed_one_leaves_no_rows"
UNMATCHED = "test_no_record_as_young_fails_or_means_the_end"

PROTECTED = [
    (option, PARSING, "test_connections_are_protected_by_kafkas_settings")
    for name in KAFKA_NAMES
    for option in (name, f"kafka.{name}")
]
READING = [
    *PROTECTED,
    ("bootstrap.servers", PARSING, "test_bootstrap_servers_has_the_name_of_kafkas_connector_too"),
    ("kafka.bootstrap.servers", PARSING, "test_bootstrap_servers_has_the_name_of_kafkas_connector_too"),
    ("subscribe", BATCH, FINDING),
    ("subscribePattern", BATCH, FINDING),
    ("subscribePattern", STREAM, "test_topics_that_appear_in_the_middle_of_a_query_are_read_from_their_beginning"),
    ("assign", BATCH, FINDING),
    ("startingTimestamp", BATCH, BOUNDS),
    ("startingOffsetsByTimestamp", BATCH, BOUNDS),
    ("startingOffsetsByTimestampStrategy", BATCH, BOUNDS),
    ("startingOffsetsByTimestampStrategy", RESOLVING, UNMATCHED),
    ("startingOffsets", BATCH, BOUNDS),
    ("startingOffsets", RESOLVING, "test_words_numbers_and_offsets_become_offsets"),
    ("startingOffsets", STREAM, LIMITED),
    ("endingTimestamp", BATCH, BOUNDS),
    ("endingOffsetsByTimestamp", BATCH, BOUNDS),
    ("endingOffsets", BATCH, BOUNDS),
    ("maxOffsetsPerTrigger", STREAM, LIMITED),
    ("minOffsetsPerTrigger", STREAM, WAITING),
    ("maxTriggerDelay", STREAM, WAITING),
    ("initialOffsetsFile", READER, "test_the_initial_offset_is_kept_where_a_file_is_named"),
    (
        "initialOffsetsFile",
        STREAM,
        "test_a_stream_that_began_at_the_end_loses_nothing_when_its_first_batch_is_not_committed",
    ),
    ("minPartitions", BATCH, BOUNDS),
    ("maxRecordsPerPartition", BATCH, BOUNDS),
    ("isolation.level", RESOLVING, "test_read_committed_ends_at_the_last_stable_offset"),
    ("kafka.isolation.level", PARSING, "test_the_isolation_level_has_the_name_of_kafkas_connector_too"),
    ("failOnDataLoss", STREAM, "test_a_topic_that_was_created_again_ends_the_query_unless_losses_are_accepted"),
    ("failOnDataLoss", STREAM, "test_a_topic_that_is_deleted_while_a_query_runs_ends_it_unless_losses_are_accepted"),
    ("failOnDataLoss", READER, "test_a_new_partition_that_has_lost_its_beginning_is_a_loss"),
    (
        "timestampOutOfRange",
        READER,
        "test_a_stream_that_met_a_timestamp_in_nanoseconds_goes_on_with_null_after_a_restart",
    ),
    ("includeHeaders", BATCH, "test_rows_are_those_of_kafkas_connector"),
    ("groupIdPrefix", READER, "test_the_group_id_prefix_names_clients_to_brokers"),
]
WRITING = [
    *PROTECTED,
    ("bootstrap.servers", WRITE, "test_rows_become_records_with_everything_that_columns_say"),
    ("kafka.bootstrap.servers", WRITE, "test_the_option_topic_wins_over_the_column"),
    ("topic", WRITE, "test_the_option_topic_wins_over_the_column"),
    ("topic", WRITE, "test_a_stream_is_written_on"),
    ("exactlyOnce", EXACTLY_ONCE, WITH_AN_ID),
    ("exactlyOnce", COPY, "start_copy"),
    ("writeId", EXACTLY_ONCE, WITH_AN_ID),
    ("transactionTimeout", EXACTLY_ONCE, WITH_AN_ID),
]


def test_every_option_stands_in_the_table() -> None:
    assert {option for option, _, _ in READING} == set(READ_OPTIONS)
    assert {option for option, _, _ in WRITING} == set(WRITE_OPTIONS)


@pytest.mark.parametrize(("option", "path", "test"), [*READING, *WRITING])
def test_an_option_is_used_by_its_test(option: str, path: str, test: str) -> None:
    text = (TESTS / path).read_text(encoding="utf-8")
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == test]
    assert len(found) == 1
    assert option in (ast.get_source_segment(text, found[0]) or "")
