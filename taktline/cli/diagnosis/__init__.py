"""What ``taktline doctor`` looks at, a file each. It needs torch, so only the doctor imports it."""
