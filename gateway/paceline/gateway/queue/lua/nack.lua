-- ARGV: now, id, verifier to avoid. Back to the head of its tenant's line; 1 if it was leased.
local id = ARGV[2]
local row = redis.call('HMGET', key('req', id), 'state', 'class', 'priority', 'tenant', 'kv_tokens')
if row[1] ~= 'leased' then return 0 end
redis.call('ZREM', key('leases'), id)
redis.call('HSET', key('req', id), 'state', 'waiting', 'avoid', ARGV[3], 'verifier', '')
charge(row[2], row[4], -tonumber(row[5]))
line_up(id, row[2], row[3] or '0', row[4], row[5], 0)
return 1
