"""Solutions of notebook 38's steps: right ones, and the first of them with a mistake."""

RIGHT = {
    "queue_s": [
        """
def queue_s(bucket_bytes, backward_s, start_s, bytes_per_s):
    total = sum(bucket_bytes)
    made, arrived = 0, 0.0
    for size in bucket_bytes:
        made += size
        leaves = max(arrived, backward_s * made / total)
        arrived = leaves + start_s + size / bytes_per_s
    return arrived - backward_s
""",
        """
def queue_s(bucket_bytes, backward_s, start_s, bytes_per_s):
    late, to_make = [], sum(bucket_bytes)
    for index, size in enumerate(bucket_bytes):
        to_make -= size
        sending = sum(start_s + each / bytes_per_s for each in bucket_bytes[index:])
        late.append(sending - backward_s * to_make / sum(bucket_bytes))
    return max(late)
""",
    ],
    "best_buckets": [
        """
def best_buckets(total_bytes, start_s, bytes_per_s):
    send_s = total_bytes / bytes_per_s
    return (send_s / start_s) ** 0.5
""",
        """
def best_buckets(total_bytes, start_s, bytes_per_s):
    size = (total_bytes * start_s * bytes_per_s) ** 0.5
    return total_bytes / size
""",
    ],
}

# By what is wrong: pieces of the first right solution and what stands there instead.
WRONG = {
    "queue_s": {
        "all leave after backward": [("backward_s * made / total", "backward_s")],
        "the link is always free": [
            ("max(arrived, backward_s * made / total)", "backward_s * made / total")
        ],
        "all are ready at once": [("max(arrived, backward_s * made / total)", "arrived")],
        "ready before it is made": [
            ("        made += size\n", ""),
            ("bytes_per_s\n", "bytes_per_s\n        made += size\n"),
        ],
        "the formula of equal buckets": [
            ("made += size", "size = total / len(bucket_bytes)\n        made += size")
        ],
        "no start": [("leaves + start_s", "leaves")],
        "from the start of backward": [("arrived - backward_s", "arrived")],
    },
    "best_buckets": {
        "no root": [(" ** 0.5", "")],
        "upside down": [("send_s / start_s", "start_s / send_s")],
        "the size of a bucket": [("return (", "return total_bytes / (")],
        "rounded": [("(send_s / start_s) ** 0.5", "round((send_s / start_s) ** 0.5)")],
        "the product": [("send_s / start_s", "send_s * start_s")],
    },
}
