package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Every such transaction is aborted, and its records are moved again.
const abortedOf = 4

// The commit of offsets is not tried again if nobody listens at the coordinator's address: it has just been killed, and the
// client has not asked for another one yet. The session has aborted the transaction, and reads its records again.
const refusedOffsets = "unable to commit transaction offsets: unable to dial"

func transfer(ctx context.Context) error {
	session, err := kgo.NewGroupTransactSession(kgo.SeedBrokers(seeds...), kgo.MetadataMinAge(200*time.Millisecond),
		kgo.TransactionalID(args["id"]), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.RequireStableFetchOffsets(),
		kgo.ConsumerGroup(args["group"]), kgo.ConsumeTopics(args["source"]), kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.ProducerLinger(0))
	if err != nil {
		return err
	}
	defer session.Close()
	for left, number := number("until"), 1; left > 0; {
		fetches := session.PollRecords(ctx, 20)
		noteErrors(fetches)
		records := fetches.Records()
		if len(records) == 0 {
			continue
		}
		if err := session.Begin(); err != nil {
			return err
		}
		failed := false
		for _, each := range records {
			session.Produce(ctx, &kgo.Record{Topic: args["topic"], Partition: each.Partition, Timestamp: each.Timestamp,
				Key: each.Key, Value: each.Value, Headers: each.Headers}, func(_ *kgo.Record, err error) {
				if err != nil {
					tell("note", err)
					failed = true
				}
			})
		}
		if err := session.Client().Flush(ctx); err != nil {
			return err
		}
		aborts := number%abortedOf == 0
		number++
		committed, err := session.End(ctx, kgo.TransactionEndTry(!aborts && !failed))
		if err != nil && strings.Contains(err.Error(), refusedOffsets) {
			tell("note", err)
			continue
		}
		if err != nil {
			return err
		}
		if committed {
			left -= int64(len(records))
			tell("moved", len(records))
		} else if aborts {
			tell("aborted", len(records))
		}
	}
	return nil
}

func fence(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	topic := args["topic"]
	observer, err := connect()
	if err != nil {
		return err
	}
	defer observer.Close()
	admin := kadm.NewClient(observer)
	sum := func(found kadm.ListedOffsets, err error) (int64, error) {
		total := int64(0)
		found.Each(func(each kadm.ListedOffset) { total += each.Offset })
		return total, errors.Join(err, found.Error())
	}
	settle := func() error {
		return until(func() (bool, error) {
			stable, err := sum(admin.ListCommittedOffsets(ctx, topic))
			if err != nil {
				return false, err
			}
			end, err := sum(admin.ListEndOffsets(ctx, topic))
			return stable == end, err
		})
	}
	start := func(options ...kgo.Opt) (*kgo.Client, error) {
		return connect(append(options, kgo.TransactionalID(args["id"]), kgo.DefaultProduceTopic(topic),
			kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	}
	write := func(producer *kgo.Client, value string) error {
		if err := producer.BeginTransaction(); err != nil {
			return err
		}
		for p := int32(0); p < 3; p++ {
			if err := producer.ProduceSync(ctx, &kgo.Record{Partition: p, Value: []byte(value)}).FirstErr(); err != nil {
				return err
			}
		}
		return nil
	}
	end := func(producer *kgo.Client, value string, try kgo.TransactionEndTry) error {
		if err := write(producer, value); err != nil {
			return err
		}
		if err := producer.EndTransaction(ctx, try); err != nil {
			return err
		}
		return settle()
	}
	first, err := start()
	if err != nil {
		return err
	}
	step("commit", func() error {
		return errors.Join(end(first, "committed", kgo.TryCommit), end(first, "committed too", kgo.TryCommit))
	})
	step("abort", func() error { return end(first, "aborted", kgo.TryAbort) })
	step("stay open", func() error {
		before, err := sum(admin.ListEndOffsets(ctx, topic))
		if err != nil {
			return err
		}
		if err := write(first, "open"); err != nil {
			return err
		}
		stable, err := sum(admin.ListCommittedOffsets(ctx, topic))
		if err == nil && stable != before {
			err = fmt.Errorf("the last stable offset moved from %d to %d", before, stable)
		}
		return err
	})
	step("be fenced", func() error {
		second, err := start()
		if err != nil {
			return err
		}
		defer second.Close()
		if err := end(second, "committed", kgo.TryCommit); err != nil {
			return err
		}
		refusal := first.EndTransaction(ctx, kgo.TryCommit)
		tell("note", refusal)
		if errors.Is(refusal, kerr.InvalidProducerEpoch) {
			return nil
		}
		return expect(refusal, kerr.ProducerFenced)
	})
	step("time out", func() error {
		late, err := start(kgo.TransactionTimeout(time.Second))
		if err != nil {
			return err
		}
		defer late.Close()
		if err := write(late, "too late"); err != nil {
			return err
		}
		if err := settle(); err != nil {
			return err
		}
		refusal := late.EndTransaction(ctx, kgo.TryCommit)
		tell("note", refusal)
		if refusal == nil {
			return errors.New("it was committed")
		}
		return nil
	})
	step("go on", func() error {
		next, err := start()
		if err != nil {
			return err
		}
		defer next.Close()
		return end(next, "committed at last", kgo.TryCommit)
	})
	return nil
}
