"""Block kernels: attention of one task list, one adapter file per library."""
