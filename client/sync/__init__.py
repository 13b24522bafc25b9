"""The blocking clients: the asynchronous ones, for scripts and threads. See `minibroker.sync`.

File map: producer.py, consumer.py and admin.py have the names and signatures of their asynchronous counterparts;
facade.py is their life, background.py the thread with the event loop.
"""

from minibroker.client.sync.admin import Admin, TimelineReader
from minibroker.client.sync.consumer import Consumer, RebalanceListener
from minibroker.client.sync.producer import BatchDelivery, Delivery, Producer

__all__ = ["Admin", "BatchDelivery", "Consumer", "Delivery", "Producer", "RebalanceListener", "TimelineReader"]
