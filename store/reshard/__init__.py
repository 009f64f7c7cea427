"""Where the elements of a tensor lie: blocks of ranks, copies between layouts, and names of other libraries."""
