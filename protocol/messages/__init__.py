"""Every request and response: one typed schema per API, in a file per family. Data only.

Fields have Kafka 3.9's names in snake_case; where one differs, its schema in `protocol/kafka` has the `kafka_name`.
Messages are positional arrays (`array_like`): unknown trailing fields are ignored and missing ones take their default,
so a message grows at its tail. Every integer has the bounds of its Kafka type and every list and string a maximum
length: msgspec checks a list's announced length before it takes memory for it. `records` stays a view of the received
frame (no copy), so keeping it longer than the request keeps the whole frame.
"""

from minibroker.protocol.messages.acls import *
from minibroker.protocol.messages.brokers import *
from minibroker.protocol.messages.configs import *
from minibroker.protocol.messages.control import *
from minibroker.protocol.messages.data import *
from minibroker.protocol.messages.fields import *
from minibroker.protocol.messages.metadata import *
from minibroker.protocol.messages.sasl import *
from minibroker.protocol.messages.topics import *
