"""The metrics that are numbers of a status: (name, key in the status, documentation) each.

Names without "persia_" are those of the published system.
"""

from __future__ import annotations

from persia.observability.phases import WAIT_FOR_BATCH

# Of the packets that rank 0 writes.
PACKET_COUNTERS = (
    ("persia_packets_written", "packets", "Packets of changes written for followers."),
    ("persia_packet_rows", "rows", "Changed and removed rows in packets."),
    ("persia_packet_bytes", "bytes", "Bytes of packets."),
    ("persia_packet_failures", "failures", "Packets that could not be written; their rows come later."),
    ("persia_packet_restarts", "restarts", "Breaks in the sequence of packets, the start of it included."),
    ("persia_packet_checkpoints", "checkpoints", "Checkpoints written because followers needed one."),
)

PACKET_GAUGES = (
    ("persia_packet_number", "number", "The newest packet."),
    ("persia_packet_lag_seconds", "lag_s", "Age of the oldest change that is in no packet yet, at most."),
)

# Of the storage tier of a parameter server: `ServerTier.status()` of persia.checkpoint.
TIER_COUNTERS = (
    ("persia_tier_hits", "num_hits", "Rows that lookups found in the cache."),
    ("persia_tier_misses", "num_misses", "Rows that lookups had to read from the tier."),
    ("persia_tier_promoted_rows", "num_promoted", "Rows read from the tier into the cache."),
    ("persia_tier_prefetched_rows", "num_prefetched", "Of these, ahead of the lookup that names them."),
    ("persia_tier_unheeded_ids", "num_unheeded", "IDs of prefetch hints that had no room."),
    ("persia_tier_demoted_rows", "num_demoted", "Rows evicted from the cache to the tier."),
    ("persia_tier_written_rows", "num_written", "Versions of rows written to the tier."),
)

TIER_GAUGES = (
    ("persia_tier_cached_rows", "num_hot", "Rows in the cache."),
    ("persia_tier_memory_bytes", "memory_bytes", "Memory of the cache and of the index of all rows."),
    ("persia_tier_pool_bytes", "pool_bytes", "Size of the tier file."),
    ("persia_tier_pool_max_bytes", "pool_max_bytes", "Size that the tier file may grow to."),
    ("persia_tier_pool_used_bytes", "pool_used_bytes", "Bytes of the tier file with rows that are needed."),
    ("persia_tier_kept_versions", "num_kept", "Older versions of rows, kept for a checkpoint."),
    ("persia_tier_pending_checkpoints", "num_pending", "Checkpoints begun and not committed."),
    ("persia_tier_committed_step", "step", "Training step of the checkpoint that a restart recovers."),
)

# Of a follower of packets: `FollowStatus.to_json()` of persia.checkpoint.
FOLLOWING_COUNTERS = (
    ("persia_inc_packets_applied", "num_applied", "Packets applied."),
    ("persia_inc_packet_retries", "num_retries", "Tries to apply a packet that failed."),
    ("persia_inc_packets_failed", "num_failed", "Packets given up, until they change."),
    ("persia_inc_storage_errors", "num_storage_errors", "Looks that failed: storage or server was away."),
    ("persia_inc_checkpoints_loaded", "num_checkpoints", "Beginnings loaded: the first, and fall-backs."),
)

FOLLOWING_GAUGES = (
    ("inc_update_delay_sec", "delay_s", "From the oldest update of the last packet until it was visible."),
    ("persia_inc_applied_number", "number", "Number of the last packet applied."),
    ("persia_inc_behind", "num_behind", "Packets written and not applied yet."),
    ("persia_inc_pinned", "pinned", "1: a pin holds it at a packet."),
    ("persia_inc_held", "held", "1: a new stream does not continue the one in use, and is not followed."),
)

# The latest durations, by the name of their phase.
SERVER_TIMES = (
    ("set_embedding_time_cost_sec", "set", "Writing rows given from outside, the latest."),
    ("decode_indices_time_cost_sec", "decode", "Decoding a lookup request, the latest."),
    ("encode_embedding_time_cost_sec", "encode", "Making the buffer of a lookup's reply, the latest."),
    ("lookup_inference_batch_time_cost_sec", "inference lookup", "Looking up without training, the latest."),
    ("lookup_hashmap_time_cost_sec", "lookup", "Looking rows up for training, the latest."),
)

WORKER_TIMES = (
    ("lookup_preprocess_time_cost_sec", "lookup preprocess", "Deduplication and routing, the latest."),
    ("lookup_rpc_time_cost_sec", "lookup rpc", "The parameter servers' answers to a batch, the latest."),
    ("lookup_postprocess_time_cost_sec", "lookup postprocess", "Pooling a batch, the latest."),
    ("lookup_total_time_cost_sec", "lookup total", "A batch's lookup in all, the latest."),
    ("update_gradient_time_cost_sec", "update gradient", "A batch's update in all, the latest."),
)

NN_TIMES = (
    ("forward_client_time_cost_sec", "client lookup", "A batch's lookup as the rank sees it, the latest."),
    ("forward_client_to_gpu_time_cost_sec", "to device", "Making a batch's tensors, the latest."),
    ("backward_client_time_cost_sec", "hand in gradients", "Handing a batch's gradients in, the latest."),
)

# Published under these names with this rule; `persia_phase_seconds` has all values.
NN_SLOW_TIMES = (
    (
        "get_train_batch_time_cost_more_than_1ms_sec",
        WAIT_FOR_BATCH.stats.name,
        "The training loop's wait for a batch, the latest above 1 ms seen.",
    ),
    (
        "update_gradient_batched_time_cost_more_than_1ms_sec",
        "client return gradients",
        "A batch's gradient return as the rank sees it, the latest above 1 ms seen.",
    ),
)
