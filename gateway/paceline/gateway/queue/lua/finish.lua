-- ARGV: now, id, served tokens (negative: nothing to correct). Removes a request in whatever state; 1 if known.
local id, served = ARGV[2], tonumber(ARGV[3])
local row = redis.call('HMGET', key('req', id), 'state', 'class', 'tenant', 'kv_tokens')
redis.call('ZREM', key('reserved'), id)
redis.call('ZREM', key('leases'), id)
if not row[1] then return 0 end
if row[1] == 'waiting' then leave_line(id, row[2], row[3]) end
if row[1] == 'leased' and served >= 0 then charge(row[2], row[3], served - tonumber(row[4])) end
redis.call('DEL', key('req', id))
return 1
