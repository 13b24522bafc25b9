"""The blocking clients, for scripts and threads: `from minibroker.sync import Admin, Consumer, Producer`.

They have the names, settings and guarantees of the asynchronous clients in `minibroker`, which also has the errors and
all other types. Any thread may call them; callbacks run in the calling threads.
"""

from minibroker.client.sync.admin import Admin, TimelineReader
from minibroker.client.sync.consumer import Consumer, RebalanceListener
from minibroker.client.sync.handover import BatchDelivery, Delivery
from minibroker.client.sync.processor import Processor
from minibroker.client.sync.producer import Producer
from minibroker.client.sync.transaction import Transaction

__all__ = [
    "Admin",
    "BatchDelivery",
    "Consumer",
    "Delivery",
    "Processor",
    "Producer",
    "RebalanceListener",
    "TimelineReader",
    "Transaction",
]
