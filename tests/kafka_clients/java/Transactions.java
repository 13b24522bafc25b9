import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.errors.*;
import org.apache.kafka.common.serialization.*;

/** Transactions of Kafka's Java client; tests/kafka_clients/programs.py describes the verbs. */
class Transactions {
    static final int ABORTED_OF = 4, PARTITIONS = 3;

    static KafkaProducer<byte[], byte[]> producer(String id, String... pairs) {
        Properties settings = Client.settings(pairs);
        settings.put("transactional.id", id);
        settings.put("max.block.ms", "20000");
        KafkaProducer<byte[], byte[]> producer =
            new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer());
        again(producer::initTransactions);
        return producer;
    }

    /** A call that times out may be repeated. */
    static void again(Runnable call) {
        for (long end = System.nanoTime() + 40_000_000_000L; ; ) {
            try {
                call.run();
                return;
            } catch (TimeoutException error) {
                if (System.nanoTime() > end) throw error;
            }
        }
    }

    static void transfer() {
        String source = Client.args.get("source");
        long left = Long.parseLong(Client.args.get("until"));
        KafkaConsumer<byte[], byte[]> consumer = Client.consumer(
            "group.id", Client.args.get("group"), "isolation.level", "read_committed", "max.poll.records", "20",
            "session.timeout.ms", Client.args.getOrDefault("session", "45000"),
            "heartbeat.interval.ms", Client.args.containsKey("session") ? "500" : "3000");
        KafkaProducer<byte[], byte[]> producer = producer(Client.args.get("id"));
        consumer.subscribe(List.of(source));
        for (int number = 1; left > 0; ) {
            ConsumerRecords<byte[], byte[]> records = consumer.poll(Duration.ofMillis(200));
            if (records.isEmpty()) continue;
            try {
                producer.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> positions = new HashMap<>();
                for (ConsumerRecord<byte[], byte[]> each : records) {
                    producer.send(new ProducerRecord<>(Client.topic, each.partition(), each.timestamp(), each.key(),
                        each.value(), each.headers()));
                    positions.put(new TopicPartition(source, each.partition()), new OffsetAndMetadata(each.offset() + 1));
                }
                producer.sendOffsetsToTransaction(positions, consumer.groupMetadata());
                if (number++ % ABORTED_OF == 0) {
                    producer.flush();
                    again(producer::abortTransaction);
                    Client.print("aborted", records.count());
                    rewind(consumer);
                    continue;
                }
                again(producer::commitTransaction);
                left -= records.count();
                Client.print("moved", records.count());
            } catch (ProducerFencedException | OutOfOrderSequenceException | AuthorizationException error) {
                throw error;
            } catch (KafkaException error) {
                Client.print("note", "aborts", error);
                again(producer::abortTransaction);
                rewind(consumer);
            }
        }
        producer.close();
        consumer.close();
    }

    static void rewind(KafkaConsumer<byte[], byte[]> consumer) {
        consumer.committed(consumer.assignment()).forEach((partition, committed) ->
            consumer.seek(partition, committed == null ? 0 : committed.offset()));
    }

    /** The sum of the partitions' ends. */
    static long end(String level) {
        try (KafkaConsumer<byte[], byte[]> consumer = Client.consumer("isolation.level", level)) {
            List<TopicPartition> all = new ArrayList<>();
            for (int p = 0; p < PARTITIONS; p++) all.add(new TopicPartition(Client.topic, p));
            return consumer.endOffsets(all).values().stream().mapToLong(Long::longValue).sum();
        }
    }

    static void settle() throws Exception {
        Client.until(() -> end("read_committed") == end("read_uncommitted"));
    }

    static void write(KafkaProducer<byte[], byte[]> producer, String value) {
        producer.beginTransaction();
        for (int p = 0; p < PARTITIONS; p++)
            producer.send(new ProducerRecord<>(Client.topic, p, null, Client.bytes(value)));
        producer.flush();
    }

    static void refused(Runnable call, Class<?>... wanted) {
        try {
            call.run();
        } catch (KafkaException error) {
            Client.print("note", error);
            for (Class<?> each : wanted) if (each.isInstance(error)) return;
            throw error;
        }
        throw new AssertionError("it was committed");
    }

    static void fence() {
        String id = Client.args.get("id");
        KafkaProducer<byte[], byte[]> first = producer(id);
        Client.step("commit", () -> {
            for (int i = 0; i < 3; i++) {
                write(first, "committed");
                first.commitTransaction();
            }
            settle();
        });
        Client.step("abort", () -> {
            write(first, "aborted");
            first.abortTransaction();
            settle();
        });
        Client.step("stay open", () -> {
            long before = end("read_uncommitted");
            write(first, "open");
            Client.check(end("read_committed") == before, end("read_committed"));
            Client.check(end("read_uncommitted") == before + PARTITIONS, end("read_uncommitted"));
        });
        Client.step("be fenced", () -> {
            KafkaProducer<byte[], byte[]> second = producer(id);
            settle();
            refused(first::commitTransaction, ProducerFencedException.class);
            write(second, "committed");
            second.commitTransaction();
            settle();
        });
        Client.step("time out", () -> {
            KafkaProducer<byte[], byte[]> late = producer(id, "transaction.timeout.ms", "1000");
            write(late, "too late");
            settle();
            refused(late::commitTransaction, KafkaException.class);
        });
        Client.step("go on", () -> {
            KafkaProducer<byte[], byte[]> next = producer(id);
            write(next, "committed at last");
            next.commitTransaction();
            settle();
        });
    }
}
