"""The blocking clients, for scripts and threads: `from minibroker.sync import Admin, Consumer, Producer`.

They have the names, settings and guarantees of the asynchronous ones in `minibroker`, where errors and all other types
are. Any thread may call them; callbacks run in the threads that call.
"""

from minibroker.client.sync import Admin, BatchDelivery, Consumer, Delivery, Producer, RebalanceListener, TimelineReader

__all__ = ["Admin", "BatchDelivery", "Consumer", "Delivery", "Producer", "RebalanceListener", "TimelineReader"]
