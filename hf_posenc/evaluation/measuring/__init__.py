"""The machine for measuring: candidates, work items, records that survive a kill, statistics."""
