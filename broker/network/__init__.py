"""The reactor: acceptors, processors, request channels and handler tasks between the sockets and the APIs.

server.py           SocketServer: binds listeners, puts the parts together, starts and stops them
acceptor.py         one per listener: connection limits, hands connections to processors in turn
quotas.py           the connection limits, pure
processor.py        owns connections: frames, decoding, mute, back-pressure, bad input, deadlines
request_channel.py  Request, and the bounded queue between processors and handlers
handler_pool.py     the tasks that take requests and run their handlers
settings.py         every limit, with a finite default
metrics.py          counters and sums per API
"""
