"""Files into shards: what checkpoint files hold, which bytes belong to which shard, and how they get there."""
