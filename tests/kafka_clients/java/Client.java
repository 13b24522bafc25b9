import java.io.IOException;
import java.io.PrintStream;
import java.io.Reader;
import java.io.UncheckedIOException;
import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.serialization.*;

/** Kafka's Java client, from version 2.8 on, with the verbs of tests/kafka_clients/programs.py, which describes the output. */
@SuppressWarnings({"deprecation", "removal"})
public class Client {
    static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    static final String NULL = "\\N";
    static Map<String, String> args = new HashMap<>();
    static String bootstrap, topic;

    public static void main(String[] argv) throws Exception {
        bootstrap = argv[0];
        for (int i = 2; i < argv.length; i++) {
            String[] pair = argv[i].split("=", 2);
            args.put(pair[0], pair[1]);
        }
        topic = args.get("topic");
        switch (argv[1]) {
            case "produce": produce(); break;
            case "consume": consume(); break;
            case "seek": seek(); break;
            case "group": group(); break;
            case "admin": admin(); break;
            case "transfer": Transactions.transfer(); break;
            case "fence": Transactions.fence(); break;
            default: throw new IllegalArgumentException(argv[1]);
        }
        print("end");
        OUT.flush();
    }

    static synchronized void print(Object... cells) {
        StringJoiner line = new StringJoiner("\t");
        for (Object cell : cells) line.add(String.valueOf(cell).replaceAll("[\t\r\n]", " "));
        OUT.println(line);
        OUT.flush();
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    static String text(byte[] data) {
        return data == null ? NULL : new String(data, StandardCharsets.UTF_8);
    }

    static Properties settings(String... pairs) {
        Properties settings = new Properties();
        String file = System.getenv("CLIENT_SETTINGS");
        if (file != null)
            try (Reader reader = Files.newBufferedReader(Path.of(file))) {
                settings.load(reader);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        settings.put("bootstrap.servers", bootstrap);
        for (int i = 0; i < pairs.length; i += 2) settings.put(pairs[i], pairs[i + 1]);
        return settings;
    }

    /** `count` records with each codec. */
    static void produce() throws Exception {
        int count = Integer.parseInt(args.get("count")), n = Integer.parseInt(args.get("first"));
        int partitions = Integer.parseInt(args.get("partitions")), perSecond = Integer.parseInt(args.get("per_second"));
        long base = Long.parseLong(args.get("base"));
        for (String codec : args.get("codecs").split(",")) {
            Properties settings = settings("acks", "all", "enable.idempotence", "true", "linger.ms", "5",
                "compression.type", codec, "delivery.timeout.ms", "60000");
            try (KafkaProducer<byte[], byte[]> producer =
                    new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
                for (int end = n + count; n < end; n++) {
                    int number = n;
                    producer.send(record(n, partitions, base + n), (metadata, error) -> {
                        if (error == null) print("ack", number, metadata.partition(), metadata.offset());
                        else print("failed", number, error);
                    });
                    if (perSecond > 0) Thread.sleep(1000 / perSecond);
                }
            }
        }
    }

    static ProducerRecord<byte[], byte[]> record(int n, int partitions, long timestamp) {
        byte[] key = n % 5 == 0 ? null : bytes("key-" + n);
        byte[] value = n % 7 == 0 ? null : bytes("value-" + n + "-" + "x".repeat(n % 100));
        ProducerRecord<byte[], byte[]> record = new ProducerRecord<>(topic, n % partitions, timestamp, key, value);
        record.headers().add("n", bytes("" + n)).add("empty", new byte[0]).add("null", null);
        return record;
    }

    static void print(ConsumerRecord<byte[], byte[]> record) {
        List<String> headers = new ArrayList<>();
        for (Header header : record.headers()) headers.add(header.key() + "=" + text(header.value()));
        print("rec", record.partition(), record.offset(), record.timestamp(), text(record.key()), text(record.value()),
            String.join(",", headers));
    }

    static KafkaConsumer<byte[], byte[]> consumer(String... pairs) {
        Properties settings = settings(pairs);
        settings.put("auto.offset.reset", "earliest");
        settings.put("enable.auto.commit", "false");
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    static List<TopicPartition> all() {
        List<TopicPartition> all = new ArrayList<>();
        for (int p = 0; p < Integer.parseInt(args.get("partitions")); p++) all.add(new TopicPartition(topic, p));
        return all;
    }

    static void consume() {
        long left = Long.parseLong(args.get("until"));
        String level = args.getOrDefault("isolation", "read_uncommitted");
        try (KafkaConsumer<byte[], byte[]> consumer = consumer("isolation.level", level)) {
            consumer.assign(all());
            while (left > 0)
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    print(record);
                    left--;
                }
        }
    }

    static void seek() {
        try (KafkaConsumer<byte[], byte[]> consumer = consumer()) {
            TopicPartition first = all().get(0);
            consumer.assign(List.of(first));
            consumer.seek(first, Long.parseLong(args.get("offset")));
            for (boolean found = false; !found; )
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                    if (!found) print(record);
                    found = true;
                }
            Map<TopicPartition, Long> times = new HashMap<>();
            for (TopicPartition each : all()) times.put(each, Long.parseLong(args.get("time")));
            consumer.offsetsForTimes(times).forEach((partition, found) ->
                print("at", partition.partition(), found == null ? -1 : found.offset()));
            consumer.beginningOffsets(all()).forEach((partition, offset) -> print("first", partition.partition(), offset));
            consumer.endOffsets(all()).forEach((partition, offset) -> print("last", partition.partition(), offset));
        }
    }

    static void group() throws Exception {
        Map<String, String> strategies = Map.of("range", "RangeAssignor", "sticky", "StickyAssignor",
            "cooperative-sticky", "CooperativeStickyAssignor");
        AtomicBoolean stopped = new AtomicBoolean();
        Thread reader = new Thread(() -> {
            try {
                while (System.in.read() >= 0);
            } catch (IOException ignored) {
                // The driver has ended, so this program stops.
            }
            stopped.set(true);
        });
        reader.setDaemon(true);
        reader.start();
        try (KafkaConsumer<byte[], byte[]> consumer = consumer("group.id", args.get("group"), "session.timeout.ms", "10000",
                "heartbeat.interval.ms", "500", "partition.assignment.strategy",
                "org.apache.kafka.clients.consumer." + strategies.get(args.get("strategy")))) {
            consumer.subscribe(List.of(topic), new ConsumerRebalanceListener() {
                void tell(String what, Collection<TopicPartition> partitions) {
                    for (TopicPartition each : partitions) print(what, each.partition());
                }
                public void onPartitionsAssigned(Collection<TopicPartition> partitions) { tell("assigned", partitions); }
                public void onPartitionsRevoked(Collection<TopicPartition> partitions) { tell("revoked", partitions); }
                public void onPartitionsLost(Collection<TopicPartition> partitions) { tell("revoked", partitions); }
            });
            while (!stopped.get()) {
                ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(100));
                for (ConsumerRecord<byte[], byte[]> record : records) print(record);
                if (records.isEmpty()) continue;
                try {
                    consumer.commitSync();
                } catch (CommitFailedException | RebalanceInProgressException error) {
                    print("note", "commit", error.getClass().getSimpleName());
                }
            }
        }
    }

    // -- administration --

    interface Body { void run() throws Exception; }

    static void step(String name, Body body) {
        try {
            body.run();
            print("ok", name);
        } catch (Throwable error) {
            Throwable cause = error instanceof ExecutionException ? error.getCause() : error;
            print("bad", name, cause);
        }
    }

    static void check(boolean holds, Object found) {
        if (!holds) throw new AssertionError("found " + found);
    }

    static void expect(Class<?> type, KafkaFuture<?> future) throws Exception {
        try {
            Object answer = future.get(20, TimeUnit.SECONDS);
            throw new AssertionError("expected " + type.getSimpleName() + ", found " + answer);
        } catch (ExecutionException error) {
            if (!type.isInstance(error.getCause())) throw error;
        }
    }

    static <T> T get(KafkaFuture<T> future) throws Exception {
        return future.get(20, TimeUnit.SECONDS);
    }

    /** The names of the results changed between 2.8 and 4. */
    @SuppressWarnings("unchecked")
    static <T> T result(Object results, String... names) throws Exception {
        for (String name : names)
            for (Method method : results.getClass().getMethods())
                if (method.getName().equals(name) && method.getParameterCount() == 0) {
                    method.setAccessible(true);
                    return ((KafkaFuture<T>) method.invoke(results)).get(20, TimeUnit.SECONDS);
                }
        throw new NoSuchMethodException(Arrays.toString(names));
    }

    static TopicDescription described(Admin admin, String name) throws Exception {
        Map<String, TopicDescription> found = result(admin.describeTopics(List.of(name)), "allTopicNames", "all");
        return found.get(name);
    }

    static String retention(Admin admin, ConfigResource resource) throws Exception {
        return get(admin.describeConfigs(List.of(resource)).all()).get(resource).get("retention.ms").value();
    }

    static void until(Callable<Boolean> condition) throws Exception {
        for (long end = System.nanoTime() + 15_000_000_000L; !condition.call(); Thread.sleep(50))
            if (System.nanoTime() > end) throw new AssertionError("not within 15 s");
    }

    static void admin() throws Exception {
        String group = topic + "-group";
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        TopicPartition zero = new TopicPartition(topic, 0);
        try (Admin admin = Admin.create(settings("default.api.timeout.ms", "20000", "request.timeout.ms", "20000"))) {
            NewTopic wanted = new NewTopic(topic, 3, (short) 3).configs(Map.of("retention.ms", "3600000"));
            step("create", () -> get(admin.createTopics(List.of(wanted)).all()));
            step("create again", () -> expect(TopicExistsException.class, admin.createTopics(List.of(wanted)).all()));
            step("create with too many replicas", () -> expect(InvalidReplicationFactorException.class,
                admin.createTopics(List.of(new NewTopic(topic + "-9", 1, (short) 9))).all()));
            step("list topics", () -> until(() -> get(admin.listTopics().names()).contains(topic)));
            step("describe topic", () -> until(() -> described(admin, topic).partitions().stream()
                .filter(each -> each.leader() != null && each.isr().size() == 3).count() == 3));
            step("describe configs", () -> check(retention(admin, resource).equals("3600000"), retention(admin, resource)));
            step("alter configs", () -> {
                get(admin.incrementalAlterConfigs(Map.of(resource, List.of(new AlterConfigOp(
                    new ConfigEntry("retention.ms", "7200000"), AlterConfigOp.OpType.SET)))).all());
                until(() -> retention(admin, resource).equals("7200000"));
            });
            step("alter configs wrongly", () -> expect(ApiException.class, admin.incrementalAlterConfigs(Map.of(resource,
                List.of(new AlterConfigOp(new ConfigEntry("retention.ms", "soon"), AlterConfigOp.OpType.SET)))).all()));
            step("describe broker configs", () -> {
                ConfigResource broker = new ConfigResource(ConfigResource.Type.BROKER, "1");
                Config config = get(admin.describeConfigs(List.of(broker)).all()).get(broker);
                check(config.get("num.partitions") != null, config);
            });
            step("create partitions", () -> {
                get(admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(5))).all());
                until(() -> described(admin, topic).partitions().size() == 5);
            });
            step("delete records", () -> {
                try (KafkaProducer<byte[], byte[]> producer =
                        new KafkaProducer<>(settings("acks", "all"), new ByteArraySerializer(), new ByteArraySerializer())) {
                    for (int n = 0; n < 10; n++) producer.send(new ProducerRecord<>(topic, 0, null, bytes("" + n)));
                }
                long low = get(admin.deleteRecords(Map.of(zero, RecordsToDelete.beforeOffset(5))).lowWatermarks().get(zero))
                    .lowWatermark();
                check(low == 5, low);
            });
            step("list offsets", () -> {
                long first = get(admin.listOffsets(Map.of(zero, OffsetSpec.earliest())).all()).get(zero).offset();
                long last = get(admin.listOffsets(Map.of(zero, OffsetSpec.latest())).all()).get(zero).offset();
                check(first == 5 && last == 10, first + " to " + last);
            });
            step("describe cluster", () -> {
                DescribeClusterResult cluster = admin.describeCluster();
                check(get(cluster.nodes()).size() == 3 && get(cluster.controller()) != null && get(cluster.clusterId()) != null,
                    get(cluster.nodes()) + " " + get(cluster.controller()) + " " + get(cluster.clusterId()));
            });
            step("alter offsets of a group", () -> get(
                admin.alterConsumerGroupOffsets(group, Map.of(zero, new OffsetAndMetadata(7, "seven"))).all()));
            step("list offsets of a group", () -> {
                OffsetAndMetadata found = get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(zero);
                check(found != null && found.offset() == 7 && found.metadata().equals("seven"), found);
            });
            step("list groups", () -> {
                Collection<ConsumerGroupListing> found = get(admin.listConsumerGroups().all());
                check(found.stream().anyMatch(each -> each.groupId().equals(group)), found);
            });
            step("describe group", () -> {
                ConsumerGroupDescription found = get(admin.describeConsumerGroups(List.of(group)).all()).get(group);
                check(found.state().toString().equals("Empty"), found);
            });
            step("delete offsets of a group", () -> {
                get(admin.deleteConsumerGroupOffsets(group, Set.of(zero)).all());
                check(get(admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata()).get(zero) == null, "the offset");
            });
            step("delete group", () -> {
                get(admin.alterConsumerGroupOffsets(group, Map.of(zero, new OffsetAndMetadata(7))).all());
                get(admin.deleteConsumerGroups(List.of(group)).all());
                check(get(admin.listConsumerGroups().all()).stream().noneMatch(each -> each.groupId().equals(group)), group);
            });
            step("describe log dirs", () -> {
                Map<Integer, Map<String, LogDirDescription>> found =
                    result(admin.describeLogDirs(List.of(1, 2, 3)), "allDescriptions");
                check(found.values().stream().flatMap(each -> each.values().stream())
                    .filter(each -> each.replicaInfos().containsKey(zero)).count() == 3, found);
            });
            step("elect leaders", () -> {
                try {
                    get(admin.electLeaders(ElectionType.PREFERRED, Set.of(zero)).all());
                } catch (ExecutionException error) {
                    if (!(error.getCause() instanceof ElectionNotNeededException)) throw error;
                }
            });
            step("reassign partitions", () -> {
                get(admin.alterPartitionReassignments(Map.of(zero, Optional.of(new NewPartitionReassignment(List.of(1, 2)))))
                    .all());
                until(() -> get(admin.listPartitionReassignments().reassignments()).isEmpty());
                until(() -> described(admin, topic).partitions().get(0).replicas().size() == 2);
            });
            step("delete topic", () -> {
                get(admin.deleteTopics(List.of(topic)).all());
                until(() -> !get(admin.listTopics().names()).contains(topic));
                try {
                    throw new AssertionError("still there: " + described(admin, topic));
                } catch (ExecutionException error) {
                    if (!(error.getCause() instanceof UnknownTopicOrPartitionException)) throw error;
                }
            });
        }
    }
}
