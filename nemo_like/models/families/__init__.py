"""Model families: one file each, whose object KIND is all that is known of the family."""
