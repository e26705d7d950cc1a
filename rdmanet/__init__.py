"""asyncio over RDMA."""
