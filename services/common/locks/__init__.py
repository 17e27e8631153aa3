"""What keeps strangers out: secrets, certificates, who may call, sockets of one's own."""
