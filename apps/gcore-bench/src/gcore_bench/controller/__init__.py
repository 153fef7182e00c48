"""`gcore-bench controller`: what controllers cost as the payload and the cluster grow."""
