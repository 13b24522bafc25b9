"""The composition root of a broker process: config -> World -> start, serve, stop.

    python -m broker [--properties FILE] [--override NAME=VALUE]...

Prints one line `ready broker.id=N port=P` to stdout once it serves; logs to stderr. SIGTERM and SIGINT stop it cleanly
(exit code 0). What keeps it from starting or serving is one line `error: ...` on stderr (exit code 1).

The order of the start: bind (so that a taken port is known first, and a free one before it is registered), ZooKeeper
session and cluster id, data directory and recovery, then serve and register. Controllers see the broker only when it
can take their orders; orders wait until the broker knows the epoch that its registration gave it.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from broker.config import BrokerConfig, InvalidConfig, broker_config, read_properties, topic_config_problem
from broker.handlers.dispatch import dispatcher
from broker.handlers.services import ControlEpoch, Services
from broker.metadata_cache import MetadataCache
from broker.network.server import SocketServer
from broker.network.settings import NetworkSettings
from broker.purgatory.purgatory import DelayedOperation, Purgatory, Timer
from broker.replication.manager import ReplicaManager
from broker.storage.manager import LogManager
from broker.supervisor import Supervisor
from broker.transactions.producer_ids import ProducerIds
from controller.controller import Controller, ControllerSettings
from controller.crash_detection import CrashDetector
from controller.leadership import Leadership
from controller.registration import Registration
from controller.zookeeper import KazooZooKeeper
from protocol.apis import Plane
from protocol.errors import BrokerError, MinibrokerError
from protocol.model import DEFAULT_LISTENER
from protocol.real_world import RealWorld
from protocol.world import World, ZooKeeperSession

logger = logging.getLogger("minibroker.broker")
