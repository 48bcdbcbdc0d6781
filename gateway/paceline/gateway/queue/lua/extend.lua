-- ARGV: now, lease ms, owner, leases as JSON [[id, verifier, epoch, class, tenant, sequences, kv tokens], ...].
-- An unknown lease is written again: the owner holds the truth, and an emptied Redis heals.
local lease = tonumber(ARGV[2])
for _, l in ipairs(cjson.decode(ARGV[4])) do
  local id, epoch = l[1], l[3]
  local row = redis.call('HMGET', key('req', id), 'state', 'epoch')
  if not row[1] then
    redis.call('HSET', key('req', id), 'state', 'leased', 'owner', ARGV[3], 'verifier', l[2], 'epoch', epoch,
      'class', l[4], 'tenant', l[5], 'sequences', l[6], 'kv_tokens', l[7])
    row = {'leased', tostring(epoch)}
  end
  if row[1] == 'leased' and tonumber(row[2]) == epoch then
    redis.call('PEXPIRE', key('req', id), lease + KEEP_MS)
    redis.call('ZADD', key('leases'), now + lease, id)
  end
end
return redis.status_reply('OK')
