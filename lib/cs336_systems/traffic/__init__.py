"""What watches, counts and logs the messages of wrappers; no wrapper needs any of it."""

from cs336_systems.traffic.gradients import log_messages
from cs336_systems.traffic.layers import count_sent_bytes
from cs336_systems.traffic.rings import pass_on
from cs336_systems.traffic.watch import Message, watch_collectives
