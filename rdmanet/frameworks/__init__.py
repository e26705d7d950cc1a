"""Other frameworks over RDMA: a module for each, which imports it. Nothing else of rdmanet imports these modules."""
