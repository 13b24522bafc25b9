"""The blocking clients, for scripts and threads; their public name is `minibroker.sync`."""

from minibroker.client.sync.admin import Admin, TimelineReader
from minibroker.client.sync.consumer import Consumer, RebalanceListener
from minibroker.client.sync.producer import BatchDelivery, Delivery, Producer

__all__ = ["Admin", "BatchDelivery", "Consumer", "Delivery", "Producer", "RebalanceListener", "TimelineReader"]
