// franz-go with the verbs of programs.py, which describes the output.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

const null = "\\N"

var (
	args  = map[string]string{}
	seeds []string
	out   sync.Mutex
)

func main() {
	seeds = strings.Split(os.Args[1], ",")
	for _, each := range os.Args[3:] {
		name, value, _ := strings.Cut(each, "=")
		args[name] = value
	}
	verbs := map[string]func(context.Context) error{
		"produce": produce, "consume": consume, "seek": seek, "group": group, "admin": admin,
		"transfer": transfer, "fence": fence,
	}
	if err := verbs[os.Args[2]](context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	tell("end")
}

func tell(cells ...any) {
	texts := make([]string, len(cells))
	for i, cell := range cells {
		texts[i] = strings.NewReplacer("\t", " ", "\n", " ").Replace(fmt.Sprint(cell))
	}
	out.Lock()
	defer out.Unlock()
	fmt.Println(strings.Join(texts, "\t"))
}

func number(name string) int64 {
	value, err := strconv.ParseInt(args[name], 10, 64)
	if err != nil {
		panic(name + ": " + err.Error())
	}
	return value
}

func textOf(data []byte) string {
	if data == nil {
		return null
	}
	return string(data)
}

func connect(options ...kgo.Opt) (*kgo.Client, error) {
	common := []kgo.Opt{kgo.SeedBrokers(seeds...), kgo.MetadataMinAge(200 * time.Millisecond)}
	if file := os.Getenv("CLIENT_SETTINGS"); file != "" {
		secured, err := security(file)
		if err != nil {
			return nil, err
		}
		common = append(common, secured...)
	}
	return kgo.NewClient(append(common, options...)...)
}

// tests/kafka_clients/settings.py describes the file.
func security(file string) ([]kgo.Opt, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	settings := map[string]string{}
	for _, line := range strings.Split(string(text), "\n") {
		name, value, _ := strings.Cut(line, "=")
		settings[name] = value
	}
	authority, err := os.ReadFile(settings["ssl.ca.location"])
	if err != nil {
		return nil, err
	}
	authorities := x509.NewCertPool()
	authorities.AppendCertsFromPEM(authority)
	user := scram.Auth{User: settings["sasl.username"], Pass: settings["sasl.password"]}
	return []kgo.Opt{
		kgo.DialTLSConfig(&tls.Config{RootCAs: authorities}), kgo.SASL(user.AsSha256Mechanism()),
		// It shows a refused password only in its log.
		kgo.WithLogger(kgo.BasicLogger(os.Stderr, kgo.LogLevelWarn, nil)),
	}, nil
}

func produce(ctx context.Context) error {
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
		"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	n, partitions := number("first"), number("partitions")
	for _, codec := range strings.Split(args["codecs"], ",") {
		client, err := connect(kgo.ProducerBatchCompression(codecs[codec]), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		if err != nil {
			return err
		}
		for end := n + number("count"); n < end; n++ {
			each := n
			client.Produce(ctx, recordOf(n, partitions), func(record *kgo.Record, err error) {
				if err != nil {
					tell("failed", each, err)
				} else {
					tell("ack", each, record.Partition, record.Offset)
				}
			})
			if perSecond := number("per_second"); perSecond > 0 {
				time.Sleep(time.Second / time.Duration(perSecond))
			}
		}
		if err := client.Flush(ctx); err != nil {
			return err
		}
		client.Close()
	}
	return nil
}

func recordOf(n, partitions int64) *kgo.Record {
	record := &kgo.Record{
		Topic: args["topic"], Partition: int32(n % partitions), Timestamp: time.UnixMilli(number("base") + n),
		Headers: []kgo.RecordHeader{{Key: "n", Value: []byte(fmt.Sprint(n))}, {Key: "empty", Value: []byte{}}, {Key: "null"}},
	}
	if n%5 != 0 {
		record.Key = []byte(fmt.Sprint("key-", n))
	}
	if n%7 != 0 {
		record.Value = []byte(fmt.Sprint("value-", n, "-", strings.Repeat("x", int(n%100))))
	}
	return record
}

func tellRecord(record *kgo.Record) {
	var headers []string
	for _, header := range record.Headers {
		headers = append(headers, header.Key+"="+textOf(header.Value))
	}
	tell("rec", record.Partition, record.Offset, record.Timestamp.UnixMilli(), textOf(record.Key), textOf(record.Value),
		strings.Join(headers, ","))
}

func noteErrors(fetches kgo.Fetches) {
	fetches.EachError(func(topic string, partition int32, err error) { tell("note", topic, partition, err) })
}

func consume(ctx context.Context) error {
	offsets := map[int32]kgo.Offset{}
	for p := int32(0); p < int32(number("partitions")); p++ {
		offsets[p] = kgo.NewOffset().AtStart()
	}
	level := kgo.ReadUncommitted()
	if args["isolation"] == "read_committed" {
		level = kgo.ReadCommitted()
	}
	client, err := connect(kgo.FetchIsolationLevel(level),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{args["topic"]: offsets}))
	if err != nil {
		return err
	}
	defer client.Close()
	for left := number("until"); left > 0; {
		fetches := client.PollFetches(ctx)
		noteErrors(fetches)
		fetches.EachRecord(func(record *kgo.Record) {
			tellRecord(record)
			left--
		})
	}
	return nil
}

func seek(ctx context.Context) error {
	topic := args["topic"]
	start := map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().AtStart()}}
	client, err := connect(kgo.ConsumePartitions(start))
	if err != nil {
		return err
	}
	defer client.Close()
	client.PollRecords(ctx, 1)
	client.SetOffsets(map[string]map[int32]kgo.EpochOffset{topic: {0: {Epoch: -1, Offset: number("offset")}}})
	for records := []*kgo.Record{}; len(records) == 0; {
		if records = client.PollRecords(ctx, 1).Records(); len(records) > 0 {
			tellRecord(records[0])
		}
	}
	admin := kadm.NewClient(client)
	byTime, err := admin.ListOffsetsAfterMilli(ctx, number("time"), topic)
	if err != nil {
		return err
	}
	ends, err := admin.ListEndOffsets(ctx, topic)
	if err != nil {
		return err
	}
	starts, err := admin.ListStartOffsets(ctx, topic)
	if err != nil {
		return err
	}
	byTime.Each(func(each kadm.ListedOffset) {
		// franz-go returns the end offset if there is no such record.
		if end, _ := ends.Lookup(topic, each.Partition); end.Offset == each.Offset && each.Timestamp == -1 {
			each.Offset = -1
		}
		tell("at", each.Partition, each.Offset)
	})
	starts.Each(func(each kadm.ListedOffset) { tell("first", each.Partition, each.Offset) })
	ends.Each(func(each kadm.ListedOffset) { tell("last", each.Partition, each.Offset) })
	return nil
}

func group(ctx context.Context) error {
	balancers := map[string]kgo.GroupBalancer{
		"range": kgo.RangeBalancer(), "sticky": kgo.StickyBalancer(), "cooperative-sticky": kgo.CooperativeStickyBalancer(),
	}
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
		cancel()
	}()
	told := func(what string) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, topics map[string][]int32) {
			for _, partition := range topics[args["topic"]] {
				tell(what, partition)
			}
		}
	}
	client, err := connect(kgo.ConsumerGroup(args["group"]), kgo.ConsumeTopics(args["topic"]), kgo.DisableAutoCommit(),
		kgo.Balancers(balancers[args["strategy"]]), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.SessionTimeout(10*time.Second), kgo.HeartbeatInterval(500*time.Millisecond), kgo.BlockRebalanceOnPoll(),
		kgo.OnPartitionsAssigned(told("assigned")), kgo.OnPartitionsRevoked(told("revoked")), kgo.OnPartitionsLost(told("revoked")))
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		fetches := client.PollFetches(ctx)
		if ctx.Err() == nil {
			noteErrors(fetches)
		}
		fetches.EachRecord(tellRecord)
		if records := fetches.Records(); len(records) > 0 {
			if err := client.CommitRecords(context.Background(), records...); err != nil {
				tell("note", "commit", err)
			}
		}
		client.AllowRebalance()
	}
	client.CloseAllowingRebalance()
	return nil
}

// -- administration --

func step(name string, body func() error) {
	if err := body(); err != nil {
		tell("bad", name, err)
	} else {
		tell("ok", name)
	}
}

func expect(found, wanted error) error {
	if !errors.Is(found, wanted) {
		return fmt.Errorf("found %v, not %v", found, wanted)
	}
	return nil
}

func until(condition func() (bool, error)) error {
	for end := time.Now().Add(15 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		holds, err := condition()
		if err != nil || holds {
			return err
		}
		if time.Now().After(end) {
			return errors.New("not within 15 s")
		}
	}
}

func admin(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	client, err := connect()
	if err != nil {
		return err
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	topic, group := args["topic"], args["topic"]+"-group"
	hour, twoHours := "3600000", "7200000"

	retention := func() (string, error) {
		found, err := admin.DescribeTopicConfigs(ctx, topic)
		if err != nil {
			return "", err
		}
		for _, config := range found[0].Configs {
			if config.Key == "retention.ms" {
				return config.MaybeValue(), found[0].Err
			}
		}
		return "", errors.New("no retention.ms")
	}
	described := func() (kadm.TopicDetail, error) {
		found, err := admin.ListTopics(ctx, topic)
		return found[topic], err
	}
	create := func(name string, replicas int16) error {
		_, err := admin.CreateTopic(ctx, 3, replicas, map[string]*string{"retention.ms": &hour}, name)
		return err
	}
	at := kadm.Offsets{}
	at.AddOffset(topic, 0, 5, -1)

	step("create", func() error { return create(topic, 3) })
	step("create again", func() error { return expect(create(topic, 3), kerr.TopicAlreadyExists) })
	step("create with too many replicas", func() error { return expect(create(topic+"-9", 9), kerr.InvalidReplicationFactor) })
	step("describe topic", func() error {
		return until(func() (bool, error) {
			found, err := described()
			whole := 0
			for _, partition := range found.Partitions {
				if partition.Leader > 0 && len(partition.ISR) == 3 {
					whole++
				}
			}
			return whole == 3, err
		})
	})
	step("describe configs", func() error {
		found, err := retention()
		if err == nil && found != hour {
			err = errors.New("found " + found)
		}
		return err
	})
	step("alter configs", func() error {
		found, err := admin.AlterTopicConfigs(ctx, []kadm.AlterConfig{{Op: kadm.SetConfig, Name: "retention.ms", Value: &twoHours}}, topic)
		if err != nil {
			return err
		}
		if found[0].Err != nil {
			return found[0].Err
		}
		return until(func() (bool, error) { now, err := retention(); return now == twoHours, err })
	})
	step("describe broker configs", func() error { _, err := admin.DescribeBrokerConfigs(ctx, 1); return err })
	step("create partitions", func() error {
		found, err := admin.UpdatePartitions(ctx, 5, topic)
		if err == nil {
			err = found.Error()
		}
		if err != nil {
			return err
		}
		return until(func() (bool, error) { now, err := described(); return len(now.Partitions) == 5, err })
	})
	step("delete records", func() error {
		writer, err := connect(kgo.RecordPartitioner(kgo.ManualPartitioner()))
		if err != nil {
			return err
		}
		defer writer.Close()
		for i := 0; i < 10; i++ {
			if err := writer.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: []byte("x")}).FirstErr(); err != nil {
				return err
			}
		}
		found, err := admin.DeleteRecords(ctx, at)
		if err == nil {
			err = found.Error()
		}
		if low, _ := found.Lookup(topic, 0); err == nil && low.LowWatermark != 5 {
			err = fmt.Errorf("the low watermark is %d", low.LowWatermark)
		}
		return err
	})
	step("describe cluster", func() error {
		found, err := admin.BrokerMetadata(ctx)
		if err == nil && (len(found.Brokers) != 3 || found.Controller < 1) {
			err = fmt.Errorf("found %v", found)
		}
		return err
	})
	step("commit", func() error { return admin.CommitAllOffsets(ctx, group, at) })
	step("list offsets of a group", func() error {
		found, err := admin.FetchOffsets(ctx, group)
		if each, _ := found.Lookup(topic, 0); err == nil && each.At != 5 {
			err = fmt.Errorf("found %v", found)
		}
		return err
	})
	step("list groups", func() error {
		found, err := admin.ListGroups(ctx)
		if _, there := found[group]; err == nil && !there {
			err = fmt.Errorf("found %v", found)
		}
		return err
	})
	step("describe group", func() error {
		found, err := admin.DescribeGroups(ctx, group)
		if err == nil && (found[group].Err != nil || found[group].State != "Empty") {
			err = fmt.Errorf("found %v", found)
		}
		return err
	})
	step("lag", func() error {
		found, err := admin.Lag(ctx, group)
		if err == nil {
			err = found.Error()
		}
		if err == nil && found[group].Lag.Total() != 5 {
			err = fmt.Errorf("found %d", found[group].Lag.Total())
		}
		return err
	})
	step("delete offsets of a group", func() error {
		set := kadm.TopicsSet{}
		set.Add(topic, 0)
		found, err := admin.DeleteOffsets(ctx, group, set)
		if err == nil {
			err = found.Error()
		}
		return err
	})
	step("delete group", func() error {
		if err := admin.CommitAllOffsets(ctx, group, at); err != nil {
			return err
		}
		found, err := admin.DeleteGroups(ctx, group)
		if err == nil {
			err = found.Error()
		}
		return err
	})
	step("describe log dirs", func() error {
		_, err := admin.DescribeAllLogDirs(ctx, nil)
		return err
	})
	step("elect leaders", func() error {
		set := kadm.TopicsSet{}
		set.Add(topic, 0)
		_, err := admin.ElectLeaders(ctx, kadm.ElectPreferredReplica, set)
		return err
	})
	step("delete topic", func() error {
		found, err := admin.DeleteTopics(ctx, topic)
		if err == nil {
			err = found.Error()
		}
		if err != nil {
			return err
		}
		return until(func() (bool, error) {
			now, err := admin.ListTopics(ctx)
			return !now.Has(topic), err
		})
	})
	return nil
}
