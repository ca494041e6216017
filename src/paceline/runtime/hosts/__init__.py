"""Other hosts: ssh, Slurm and Kubernetes."""
