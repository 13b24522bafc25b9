// kafkajs with the verbs of programs.py, which describes the output.
"use strict";

const { readFileSync } = require("fs");
const { CompressionCodecs, CompressionTypes, Kafka, logLevel } = require("kafkajs");
CompressionCodecs[CompressionTypes.Snappy] = require("kafkajs-snappy");

const NULL = "\\N";
const [bootstrap, verb, ...rest] = process.argv.slice(2);
const args = Object.fromEntries(rest.map((each) => [each.slice(0, each.indexOf("=")), each.slice(each.indexOf("=") + 1)]));
const { topic } = args;
const partitions = Number(args.partitions);

// tests/kafka_clients/settings.py describes the file.
function security(file) {
  if (file === undefined) return {};
  const lines = readFileSync(file, "utf8").split("\n").filter((line) => line);
  const settings = Object.fromEntries(lines.map((line) => [line.slice(0, line.indexOf("=")), line.slice(line.indexOf("=") + 1)]));
  return {
    ssl: { ca: [readFileSync(settings["ssl.ca.location"], "utf8")] },
    sasl: { mechanism: settings["sasl.mechanism"].toLowerCase(), username: settings["sasl.username"], password: settings["sasl.password"] },
  };
}

const kafka = new Kafka({ ...security(process.env.CLIENT_SETTINGS), brokers: bootstrap.split(","), logLevel: logLevel.NOTHING, retry: { retries: 20, initialRetryTime: 100, maxRetryTime: 1000 } });

const tell = (...cells) => console.log(cells.map((cell) => String(cell).replace(/[\t\r\n]/g, " ")).join("\t"));
const textOf = (data) => (data === null || data === undefined ? NULL : data.toString());
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

function messageOf(n) {
  return {
    partition: n % partitions,
    timestamp: String(Number(args.base) + n),
    key: n % 5 === 0 ? null : `key-${n}`,
    value: n % 7 === 0 ? null : `value-${n}-${"x".repeat(n % 100)}`,
    headers: { n: String(n), empty: "", null: "" },
  };
}

/** kafkajs takes a connection that breaks while it authenticates for a refusal, and does not try again
 * (saslAuthenticator/scram.js). Its programs must. */
const brokeWhileAuthenticating = (error) => /authentication failed: Connection error/.test(error.message);

async function produce() {
  const count = Number(args.count), perSecond = Number(args.per_second);
  const types = { none: CompressionTypes.None, gzip: CompressionTypes.GZIP, snappy: CompressionTypes.Snappy };
  const producer = kafka.producer({ idempotent: true, maxInFlightRequests: 1 });
  await producer.connect();
  let n = Number(args.first);
  for (const codec of args.codecs.split(",")) {
    for (const end = n + count; n < end; ) {
      // One call for each partition, and one at a time per partition. kafkajs drops a call's records for a partition
      // whose leader moves to a broker that has answered the call for another partition (sendMessages.js,
      // `brokersWithoutResponse`).
      const numbers = Array.from({ length: Math.min(9, end - n) }, (_, i) => n + i);
      n += numbers.length;
      await Promise.all(Array.from({ length: partitions }, async (_, partition) => {
        const own = numbers.filter((each) => each % partitions === partition);
        if (own.length === 0) return;
        for (let again = true; again; ) {
          again = false;
          try {
            const [{ baseOffset }] = await producer.send({ topic, acks: -1, compression: types[codec], messages: own.map(messageOf) });
            own.forEach((each, i) => tell("ack", each, partition, baseOffset === "-1" ? -1 : Number(baseOffset) + i));
          } catch (error) {
            again = brokeWhileAuthenticating(error);
            if (!again) own.forEach((each) => tell("failed", each, error));
          }
        }
      }));
      if (perSecond) await sleep((1000 * numbers.length) / perSecond);
    }
  }
  await producer.disconnect();
}

function tellRecord(partition, message) {
  const headers = Object.entries(message.headers || {}).map(([name, value]) => `${name}=${textOf(value)}`);
  tell("rec", partition, message.offset, message.timestamp, textOf(message.key), textOf(message.value), headers.join(","));
}

/** kafkajs cannot assign partitions, so a group with one member reads from the beginning. After a broker's error the
 * member restarts at its last commit; records that it has already printed are not printed again. */
async function read(until, from) {
  const next = {};
  const consumer = kafka.consumer({ groupId: `${topic}-${verb}-${process.pid}`, minBytes: 1, maxWaitTimeInMs: 200, readUncommitted: args.isolation !== "read_committed" });
  await consumer.connect();
  await consumer.subscribe({ topics: [topic], fromBeginning: true });
  let left = until;
  await new Promise((done, failed) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => payload.restart || failed(payload.error));
    consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        if (left <= 0 || (from !== undefined && (partition !== 0 || Number(message.offset) < from))) return;
        if (Number(message.offset) < (next[partition] || 0)) return;
        next[partition] = Number(message.offset) + 1;
        tellRecord(partition, message);
        if (--left === 0) done();
      },
    }).catch(failed);
    if (from !== undefined) consumer.seek({ topic, partition: 0, offset: String(from) });
  });
  await consumer.disconnect();
}

async function seek() {
  await read(1, Number(args.offset));
  const admin = kafka.admin();
  await admin.connect();
  const ends = await admin.fetchTopicOffsets(topic);
  for (const { partition, offset } of await admin.fetchTopicOffsetsByTimestamp(topic, Number(args.time))) tell("at", partition, offset);
  for (const { partition, low, high } of ends) {
    tell("first", partition, low);
    tell("last", partition, high);
  }
  await admin.disconnect();
}

async function group() {
  const consumer = kafka.consumer({
    groupId: args.group, sessionTimeout: 10000, heartbeatInterval: 500, rebalanceTimeout: 15000, maxWaitTimeInMs: 200,
  });
  let held = [];
  const revoke = () => {
    held.forEach((partition) => tell("revoked", partition));
    held = [];
  };
  consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => {
    revoke();
    held = payload.memberAssignment[topic] || [];
    held.forEach((partition) => tell("assigned", partition));
  });
  consumer.on(consumer.events.REBALANCING, revoke);
  consumer.on(consumer.events.CRASH, ({ payload }) => tell("note", "crash", payload.error, payload.restart));
  await consumer.connect();
  await consumer.subscribe({ topics: [topic], fromBeginning: true });
  await consumer.run({
    partitionsConsumedConcurrently: 3,
    autoCommit: true,
    eachBatchAutoResolve: true,
    eachMessage: async ({ partition, message }) => tellRecord(partition, message),
  });
  await new Promise((done) => process.stdin.once("data", done).once("end", done));
  await consumer.disconnect();
}

// -- steps --

const step = async (name, body) => {
  try {
    await body();
    tell("ok", name);
  } catch (error) {
    tell("bad", name, error);
  }
};
const check = (holds, found) => {
  if (!holds) throw new Error(`found ${JSON.stringify(found)}`);
};
const until = async (condition) => {
  for (const end = Date.now() + 15000; !(await condition()); await sleep(50)) if (Date.now() > end) throw new Error("not within 15 s");
};

async function admin() {
  const client = kafka.admin();
  await client.connect();
  const groupId = `${topic}-group`;
  const resource = { type: 2, name: topic };
  const retention = async () =>
    (await client.describeConfigs({ includeSynonyms: false, resources: [resource] })).resources[0].configEntries.find(
      (each) => each.configName === "retention.ms").configValue;
  const described = async () => (await client.fetchTopicMetadata({ topics: [topic] })).topics[0].partitions;
  const wanted = { topics: [{ topic, numPartitions: 3, replicationFactor: 3, configEntries: [{ name: "retention.ms", value: "3600000" }] }] };

  await step("create", async () => check(await client.createTopics(wanted), false));
  await step("create again", async () => check(!(await client.createTopics(wanted)), true));
  await step("list topics", () => until(async () => (await client.listTopics()).includes(topic)));
  await step("describe topic", () => until(async () => (await described()).filter((each) => each.isr.length === 3).length === 3));
  await step("describe configs", async () => check((await retention()) === "3600000", await retention()));
  await step("alter configs", async () => {
    await client.alterConfigs({ validateOnly: false, resources: [{ ...resource, configEntries: [{ name: "retention.ms", value: "7200000" }] }] });
    await until(async () => (await retention()) === "7200000");
  });
  await step("create partitions", async () => {
    await client.createPartitions({ topicPartitions: [{ topic, count: 5 }] });
    await until(async () => (await described()).length === 5);
  });
  await step("delete records", async () => {
    const producer = kafka.producer();
    await producer.connect();
    await producer.send({ topic, messages: Array.from({ length: 10 }, (_, i) => ({ partition: 0, value: `${i}` })) });
    await producer.disconnect();
    await client.deleteTopicRecords({ topic, partitions: [{ partition: 0, offset: "5" }] });
    const [first] = (await client.fetchTopicOffsets(topic)).filter((each) => each.partition === 0);
    check(first.low === "5" && first.high === "10", first);
  });
  await step("describe cluster", async () => {
    const found = await client.describeCluster();
    check(found.brokers.length === 3 && found.controller > 0, found);
  });
  await step("set offsets of a group", () => client.setOffsets({ groupId, topic, partitions: [{ partition: 0, offset: "7" }] }));
  await step("list offsets of a group", async () => {
    const found = await client.fetchOffsets({ groupId, topics: [topic] });
    check(found[0].partitions.some((each) => each.partition === 0 && each.offset === "7"), found);
  });
  await step("list groups", async () => {
    const found = await client.listGroups();
    check(found.groups.some((each) => each.groupId === groupId), found);
  });
  await step("describe group", async () => {
    const found = await client.describeGroups([groupId]);
    check(found.groups[0].state === "Empty", found);
  });
  await step("delete group", () => client.deleteGroups([groupId]));
  await step("delete topic", async () => {
    await client.deleteTopics({ topics: [topic] });
    await until(async () => !(await client.listTopics()).includes(topic));
  });
  await client.disconnect();
}

// -- transactions --

const ABORTED_OF = 4; // Every such transaction is aborted, and its records are moved again.

function transactional(settings = {}) {
  return kafka.producer({ transactionalId: args.id, maxInFlightRequests: 1, idempotent: true, ...settings });
}

async function transfer() {
  const producer = transactional();
  const consumer = kafka.consumer({
    groupId: args.group, sessionTimeout: 10000, heartbeatInterval: 500, rebalanceTimeout: 15000, maxWaitTimeInMs: 200, readUncommitted: false,
  });
  await producer.connect();
  await consumer.connect();
  await consumer.subscribe({ topics: [args.source], fromBeginning: true });
  let left = Number(args.until), number = 0;
  await new Promise((done, failed) => {
    consumer.on(consumer.events.CRASH, ({ payload }) => payload.restart || failed(payload.error));
    consumer.run({
      autoCommit: false,
      eachBatchAutoResolve: false,
      eachBatch: async ({ batch, resolveOffset, isStale, heartbeat }) => {
        for (let at = 0; at < batch.messages.length && left > 0 && !isStale(); ) {
          const messages = batch.messages.slice(at, at + 20);
          const { partition } = batch;
          const next = String(Number(messages[messages.length - 1].offset) + 1);
          const transaction = await producer.transaction();
          try {
            await transaction.send({ topic, messages: messages.map(({ key, value, headers, timestamp }) => ({ partition, key, value, headers: { ...headers, null: "" }, timestamp })) });
            await transaction.sendOffsets({ consumerGroupId: args.group, topics: [{ topic: args.source, partitions: [{ partition, offset: next }] }] });
            if (++number % ABORTED_OF === 0) {
              await transaction.abort();
              tell("aborted", messages.length);
              continue;
            }
            await transaction.commit();
          } catch (error) {
            tell("note", "aborts", error);
            if (transaction.isActive()) await transaction.abort();
            continue;
          }
          at += messages.length;
          resolveOffset(messages[messages.length - 1].offset);
          left -= messages.length;
          tell("moved", messages.length);
          await heartbeat();
        }
        if (left <= 0) done();
      },
    }).catch(failed);
  });
  await consumer.disconnect();
  await producer.disconnect();
}

async function fence() {
  const write = async (producer, value) => {
    const transaction = await producer.transaction();
    await transaction.send({ topic, messages: [0, 1, 2].map((partition) => ({ partition, value })) });
    return transaction;
  };
  const refused = async (call) => {
    const refusal = await call().then(() => null, (error) => error);
    tell("note", refusal);
    check(refusal && refusal.type !== undefined, refusal);
    return refusal;
  };
  const first = transactional();
  await first.connect();
  await step("commit", async () => {
    for (const value of ["committed", "committed too"]) await (await write(first, value)).commit();
  });
  await step("abort", async () => (await write(first, "aborted")).abort());
  await step("be fenced", async () => {
    const open = await write(first, "open");
    const second = transactional();
    await second.connect();
    await (await write(second, "committed")).commit();
    const refusal = await refused(() => open.commit());
    check(["PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH"].includes(refusal.type), refusal.type);
  });
  await step("time out", async () => {
    const late = transactional({ transactionTimeout: 1000 });
    await late.connect();
    const transaction = await write(late, "too late");
    await sleep(4000); // kafkajs cannot read the last stable offset.
    await refused(() => transaction.commit());
  });
  await step("go on", async () => {
    const next = transactional();
    await next.connect();
    await (await write(next, "committed at last")).commit();
  });
}

const VERBS = { produce, consume: () => read(Number(args.until)), seek, group, admin, transfer, fence };
VERBS[verb]().then(() => {
  tell("end");
  process.exit(0);
}, (error) => {
  console.error(error);
  process.exit(1);
});
