import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;

/** The verb `count` of `programs`: an instance of a Kafka Streams application, with a repartition and a changelog topic. */
class Counting {
    private static final int KEYS = 7;

    public static void main(String[] words) throws Exception {
        Map<String, String> arguments = new HashMap<>();
        for (int at = 2; at < words.length; at++) {
            String[] pair = words[at].split("=", 2);
            arguments.put(pair[0], pair[1]);
        }
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("application.id", arguments.get("id"));
        settings.put("state.dir", arguments.get("directory"));
        settings.put("processing.guarantee", "exactly_once_v2");
        settings.put("num.standby.replicas", 1);
        settings.put("statestore.cache.max.bytes", 0); // so that each count is written
        settings.put("main.consumer.session.timeout.ms", 6000);
        settings.put("main.consumer.heartbeat.interval.ms", 1000);
        settings.put("consumer.auto.offset.reset", "earliest");
        settings.put("default.key.serde", Serdes.StringSerde.class);
        settings.put("default.value.serde", Serdes.StringSerde.class);

        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(arguments.get("source"), Consumed.with(Serdes.ByteArray(), Serdes.ByteArray()))
            .map((key, value) -> KeyValue.pair("key " + (value == null ? 0 : value.length % KEYS), ""))
            .groupByKey(Grouped.with(Serdes.String(), Serdes.String()))
            .count()
            .toStream()
            .mapValues(String::valueOf)
            .to(arguments.get("topic"));
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        streams.setStateListener((now, before) -> tell("state", now.name()));
        streams.setUncaughtExceptionHandler(error -> {
            tell("failed", error.toString());
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.start();
        System.in.read();
        streams.close(Duration.ofSeconds(30));
        tell("end");
    }

    private static synchronized void tell(String... cells) {
        System.out.println(String.join("\t", cells).replace("\n", " "));
    }
}
